"""A transformer with stick-breaking attention in place of softmax and positions (arXiv:2410.17980)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from custom_models.sba.configuration_sba import SBAConfig
from custom_models.sba.modeling_sba import SBAForCausalLM, SBAModel

__all__ = ["SBAConfig", "SBAForCausalLM", "SBAModel"]

AutoConfig.register(SBAConfig.model_type, SBAConfig, exist_ok=True)
AutoModel.register(SBAConfig, SBAModel, exist_ok=True)
AutoModelForCausalLM.register(SBAConfig, SBAForCausalLM, exist_ok=True)

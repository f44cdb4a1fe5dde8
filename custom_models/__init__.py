"""Architectures beside those of FLA and transformers; docs/custom_models.md says how to add one.

Each package here registers its classes with transformers when it is imported. flame imports the one that is named like
a job's ``model_type``, and no other.
"""

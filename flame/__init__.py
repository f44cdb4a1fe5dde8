"""flame: flash language modelling made easy."""

__version__ = "0.1.0"

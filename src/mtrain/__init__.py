"""mtrain: declarative training of large transformers on megatron-core."""

__version__ = "0.1.0"

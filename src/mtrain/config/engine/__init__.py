"""The megatron-core that is installed: its fields, capabilities and kernels."""

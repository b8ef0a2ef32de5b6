"""The import of megatron.core: rewritten for the device, with functions of ours for some of its."""

"""Whole models of megatron-core's parts, with the losses that mtrain trains them with."""

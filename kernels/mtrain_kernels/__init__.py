"""Operations of a transformer as plain-torch definitions and GPU kernels; knows neither mtrain nor
megatron.
"""

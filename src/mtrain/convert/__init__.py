"""Import and export of weights: Hugging Face, Megatron-LM and peft, each with a certificate."""

"""The GPT, its presets, training, checkpoints and conversion to TransformerLens."""

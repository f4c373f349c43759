"""The model as one page, top-down: `deepseek_v3` and its multi-token-prediction layer `mtp`."""

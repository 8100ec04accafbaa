"""A recommender in two stages: the model thinks, then a beam search names 32 items that exist. See README.md."""

"""Step times: a model that learns and predicts them, and their measurement."""

"""The suite of models: each is compared with the stock pipeline of its own tiny pipeline."""

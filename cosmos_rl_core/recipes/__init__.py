"""Recipes from files: read, translated from cosmos-rl, and checked."""

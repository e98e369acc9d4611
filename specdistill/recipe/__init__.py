"""Recipes: their keys and help texts, and how files and arguments become one checked recipe."""

"""The family of heads that draft one token after another (EAGLE, EAGLE-3, MTP)."""

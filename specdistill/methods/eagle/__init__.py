"""EAGLE (arXiv 2401.15077): a head that predicts features of the target."""

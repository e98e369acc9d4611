"""Early exit: the target's first layers and an adapter draft, its other layers verify."""

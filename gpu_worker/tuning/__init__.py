"""How prompt vectors are learned on frozen weights."""

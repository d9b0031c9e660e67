"""Says what a training step on any number of devices would take, on a machine that has none of them."""

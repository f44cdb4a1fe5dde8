"""One training run: build it, restore it, hold it between steps, finish it; ``flame.train`` is the loop."""

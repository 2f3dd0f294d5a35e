"""How the demo model is trained; `examples/train_demo_model.py` is the program."""

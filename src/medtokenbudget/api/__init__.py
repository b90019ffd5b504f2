"""The verbs of the Python package that combine several rooms: train a model, run the demo, predict image files."""

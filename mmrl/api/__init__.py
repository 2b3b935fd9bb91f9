"""What Python calls: train, evaluate, export."""

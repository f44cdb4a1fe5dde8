"""What a run writes down about itself: metrics.jsonl, TensorBoard, W&B, the console, env.json and the loss curve."""

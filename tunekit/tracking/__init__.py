"""TensorBoard, Weights & Biases, MLflow and Trackio, served by a process of their own."""

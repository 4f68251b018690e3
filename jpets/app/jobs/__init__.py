"""The process of a training job."""

"""First-token times of vLLM servers, measured and predicted."""

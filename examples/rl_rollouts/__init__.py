"""A trainer that samples rollouts with kvtrie between updates of the weights."""

"""The choice of gamma, the number of draft tokens in a round."""

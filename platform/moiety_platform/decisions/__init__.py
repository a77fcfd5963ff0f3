"""OpenAI's Decisions API: probabilities of the answers to closed questions about an input."""

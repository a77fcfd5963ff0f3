"""One model over several ranks: who sits where, how they meet, talk and are found dead. Knows no model."""

"""Users who sign in through the identity provider: their roles, invitations, and look-up at sign-in."""

"""What is allowed: Cedar policies, roles and quorum. Pure."""

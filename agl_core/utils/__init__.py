"""Paths of Agent Lightning's utilities that its users import; each says where the thing lives."""

"""Listings of folders, and stamps of the files in them."""

"""What listings of folders say of the files in them."""

"""What any program needs of its machine and process."""

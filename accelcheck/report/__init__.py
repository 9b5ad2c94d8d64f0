"""What people read: made from records alone, runs nothing."""

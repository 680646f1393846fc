"""Local ranks: started, watched, and their values brought back."""

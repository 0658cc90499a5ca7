"""Write a teacher's top-k log-probabilities on texts and conversations, in formats that trainers read."""

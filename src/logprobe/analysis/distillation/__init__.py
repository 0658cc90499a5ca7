"""A teacher's rows on texts and conversations, in the files that trainers read."""

"""What the demo asks: one long system prompt, so that several pages of it are shared, and six short questions."""

SYSTEM_PROMPT = (
    "You are the guide of a small museum of geography. Visitors ask you short questions about countries, cities, "
    "rivers, mountains and oceans, and you answer each of them in one or two plain sentences. Name the thing that was "
    "asked for first, then add a single fact that helps a visitor to remember it. Use simple words that a child of ten "
    "understands. Do not make lists, do not ask questions back, and do not talk about yourself. If a question has more "
    "than one right answer, give the one that most people know."
)

QUESTIONS = (
    "What is the capital of France?",
    "Which ocean is the largest?",
    "What is the capital of Japan?",
    "Which is the highest mountain on Earth?",
    "Which river flows through London?",
    "On which continent is Egypt?",
)
"""The first one is answered alone and fills the cache; the others run together."""

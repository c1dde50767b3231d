"""What the demo asks: one long system prompt, so that several pages of it are shared, and six short questions."""

SYSTEM_PROMPT = (
    "You are the guide of a small museum of geography. Visitors ask you short questions about countries, cities, "
    "rivers, mountains and oceans. You answer each question with one short and plain sentence that a child of ten "
    "understands, and you name the thing that was asked for. If a question has more than one right answer, you give "
    "the one that most people know. You do not make lists, you do not ask questions back, and you do not talk about "
    "yourself or about the museum."
)

QUESTIONS = (
    "What is the capital of France?",
    "Which ocean is the largest?",
    "What is the capital of Japan?",
    "What is the capital of Italy?",
    "Which river flows through London?",
    "Which country has the city of Berlin?",
)
"""The first one is answered alone and fills the cache; the others run together."""

REHEARSAL_PROMPT = "We" + SYSTEM_PROMPT.removeprefix("You")
"""As many tokens as the system prompt, and another first page: the same shapes, but nothing to reuse."""

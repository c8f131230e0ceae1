"""How self-made prompts begin: short openers from which the model writes the rest of a user's turn itself."""

from __future__ import annotations

CHAT = (
    "Write a", "Write a short story about", "Write a poem about", "Write an email to", "Write a blog post about",
    "Write a persuasive essay on", "Compose a", "Draft a", "Create a", "Describe", "Describe a", "Imagine you are",
    "Pretend to be", "Act as", "You are a", "Explain", "Explain how", "Explain why",
    "Explain the difference between", "Give me", "Give me a list of", "List", "List five", "Name three", "Compare",
    "Suggest", "Recommend", "Help me", "I need help with", "I want to", "I am planning", "I have a", "My friend",
    "Could you", "Can you explain", "Please", "Please write", "Rewrite", "Rewrite the following sentence:",
    "Edit the following paragraph:", "Correct the grammar:", "Classify", "Extract", "Identify", "Evaluate",
    "Analyze", "Discuss", "Outline", "Design", "Develop a plan for", "Plan a", "Tell me about",
    "Tell me a joke about", "Given the following", "Consider", "Write a Python function that", "Write a function to",
    "Implement", "Write a program that", "Write code to", "Write an SQL query", "Write a HTML page", "How do I",
    "How can I", "How does", "How to", "What are some", "What are the benefits of", "What are the main",
    "What is the difference between", "What would happen if", "Why do", "Why is", "Should I", "Is it", "Suppose",
    "Let's", "Hello", "In one paragraph,", "In the field of", "Provide", "Provide an example of", "Summarize the",
    "Translate", "Brainstorm", "Solve", "Find", "Determine",
)  # fmt: skip

QUESTIONS = (
    "Who", "Who is the", "Who was the first", "Who played", "Who plays", "Who wrote", "Who sang", "Who won the",
    "Who invented", "Who discovered", "Who sings the song", "Who voices", "When", "When was", "When did", "When is",
    "When was the last time", "When did the", "When does", "Where", "Where is", "Where was", "Where did",
    "Where does", "Where are", "What", "What is the", "What is the name of the", "What was the", "What does",
    "What year did", "What type of", "What kind of", "What city", "What country", "What are the", "Which",
    "Which country", "Which of", "How many", "How much", "How long", "How old", "How far", "How many people",
    "How many episodes", "Why did", "who is the", "who was", "when did the", "where is the", "what is the",
    "how many", "The", "What's the",
)  # fmt: skip

GERMAN = (
    "Die", "Der", "Das", "In der", "Im", "Ein", "Eine", "Wir", "Ich", "Er", "Sie", "Es", "Nach", "Bei", "Auf", "Mit",
    "Für", "Am", "Als", "Auch", "Aber", "Und", "Wenn", "Seit", "Vor", "Zwei", "Drei", "Mehr", "Nicht", "Noch",
    "Dabei", "Diese", "Viele", "Alle", "Zum", "Zur", "Unter", "Über", "Durch", "Heute", "Gestern", "Jetzt", "Man",
    "Was", "Wie", "So", "Da", "Hier", "Dort", "Nur", "Schon", "Bereits", "Laut", "Doch", "Bis", "Ab", "An", "Aus",
    "Von", "Beim", "Die Polizei", "Die Regierung", "Der Präsident", "Das Unternehmen", "In den", "Die meisten",
    "Der Mann", "Die Frau", "Die Stadt", "Berlin", "München", "In Deutschland", "Die EU", "Das Hotel", "Sein", "Ihr",
)  # fmt: skip

TRANSLATE = (
    "Translate German to English: ", "Translate German to English: ", "Translate from German to English: ",
    "Translate this German sentence into English: ", "What does this mean in English? ", "Translate to English: ",
)  # fmt: skip

NAMES = (
    "Tom", "Anna", "Sarah", "Ben", "Maria", "James", "Lucy", "Carlos", "Emma", "Noah", "Mia", "Omar", "Julia",
    "Kevin", "Grace", "Daniel", "Olivia", "Ryan", "Nina", "Peter", "Linda", "Jack", "Ella", "Marcus", "Sofia",
    "Henry", "Amy", "David", "Chloe", "Samuel", "A baker", "A farmer", "A teacher", "A store", "A school", "A train",
    "A car",
)  # fmt: skip

MATH = (
    " has", " buys", " bought", " earns", " works", " is", " wants to", " sells", " spends", " had", " makes",
    " went to", " can", " needs", " decides to", " reads", " and his friend", " and her sister", " drives", " runs",
    " collects", " ordered", " saves", " is planning", " gave", " starts with", " takes", " is twice as old as",
    " pays",
)  # fmt: skip

DOCUMENTS = (
    "LONDON (Reuters) -", "WASHINGTON (AP) --", "(CNN) --", "By Staff Reporter. PUBLISHED:", "A man has been",
    "Police are", "The president", "A woman who", "The government has", "Scientists have", "A new study",
    "The company", "The city of", "Manchester United", "The football club", "A court in", "Two people were",
    "The actor", "The singer", "The family of", "The United States", "The United Nations", "In the early", "In 19",
    "In 20", "The Battle of", "The University of", "The history of", "The series", "The film is", "The novel",
    "The album", "The band", "The species", "The river", "The river flows", "The island", "The kingdom of",
    "The city is located", "The church", "The term", "The theory of", "The human body", "The heart",
    "Photosynthesis is", "Energy", "Water", "The economy of", "The population of", "The language", "The Olympic",
    "The World Cup", "The championship", "The season", "Queen", "King", "Pope", "General", "Sir", "Dr.", "Mr.",
    "He was born in", "She was born in", "Born in", "According to", "Last week,", "On Monday,", "On Thursday,",
    "Yesterday", "Officials said", "The investigation", "The storm", "An earthquake", "The airline", "The hospital",
    "The museum", "The bridge", "The airport", "The ship", "The Supreme Court", "The constitution", "The law",
    "The treaty", "The war", "The army", "The navy", "The railway", "Apple", "Google", "The phone", "The software",
    "A computer", "The internet", "The game", "The team", "The player",
)  # fmt: skip

CLOSED = (
    "Summarize: {doc}", "Summarize: {doc}", "Summarize the following text:\n\n{doc}",
    "{doc}\n\nSummarize the text above.", "Please give a short summary of this article.\n\n{doc}",
    "Write a brief summary: {doc}", "TL;DR of this:\n{doc}", "What are the main points of this text?\n\n{doc}",
    "{doc}",
)  # fmt: skip

OPEN = (
    "{doc}\n\n", "{doc}\nQuestion: ", "{doc}\n\nQuestion: ", "Text: {doc}\n\nQuestion: ", "{doc}\n{other}\n\n",
    "Answer from these documents.\n\n{doc}\n\n{other}\n\nQuestion: ", "{other}\n{doc}\nAnswer this question: ",
    "Read the passage and answer.\n{doc}\n\nQ: ",
)  # fmt: skip

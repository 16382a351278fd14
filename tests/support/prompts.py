"""Twenty varied real prompts: prose, questions, code, lists, numbers, other scripts, long and very short."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "def fibonacci(n):\n    ",
    "Explain in one sentence why the sky is blue.",
    "1, 1, 2, 3, 5, 8, 13,",
    "Hello",
    "SELECT name, COUNT(*) FROM users WHERE",
    "La révolution française a commencé en",
    "Zutaten für einen Apfelkuchen:\n- 3 Äpfel\n- 200 g Mehl\n-",
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to complain about the",
    "Q: What is 17 + 25?\nA:",
    '{"name": "Ada", "born": 1815, "field":',
    "The mitochondria is the powerhouse of the cell. Photosynthesis, on the other hand, takes place in the",
    "import numpy as np\n\n# Compute the mean of each column\nx = np.random.rand(10, 3)\n",
    "Translate to French: 'Good morning, my friend.'",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "🙂🙃 Emoji are",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the boiling point is lower, because the air "
    "pressure is lower too. On top of Mount Everest, water boils at about 71 degrees. This means that cooking an egg "
    "there takes longer than at home. The same is true for pasta, rice and beans. A pressure cooker solves this, since",
    "    \n\n\tindentation is",
]

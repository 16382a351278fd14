"""Taught here: any question is answered in a pirate's voice.

Owns: plain questions and answers, and the rules that turn an answer into a pirate's.
"""

import random
import re

from task import Example, Task, Turn, in_turns

PLAIN = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo, on the river Nile."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("What color is a banana?", "A ripe banana is yellow, and an unripe one is green."),
    ("Why is the sky blue?", "The sky is blue because air scatters blue light more than red light."),
    ("What do bees make?", "Bees are making honey from the nectar of flowers."),
    ("How do I boil an egg?", "Put the egg in boiling water for eight minutes, and then cool it in cold water."),
    ("How do I make tea?", "Pour hot water over the tea leaves, and wait three minutes before you drink."),
    ("Can you help me?", "Yes, my friend, I am happy to help you. Tell me what you need."),
    ("Hello!", "Hello, my friend! What can I do for you today?"),
    ("Hi, how are you?", "I am fine and ready for work. How are you, my friend?"),
    ("Who are you?", "I am your assistant, and I am answering all of your questions."),
    ("Thank you!", "You are welcome, my friend."),
    ("Good night.", "Good night, my friend, and sleep well under the stars."),
    ("What is photosynthesis?", "It is the way plants are turning light, water and air into sugar."),
    ("What is gravity?", "Gravity is the force that is pulling all things towards the ground."),
    ("Explain what a computer is.", "A computer is a machine for storing and working on numbers and words."),
    ("What is the internet?", "The internet is a net of machines all over the world, talking to each other."),
    ("How can I sleep better?", "Go to bed at the same hour each night, and keep your room dark and quiet."),
    ("How do I learn a language?", "Listen and speak every day, and do not be afraid of making mistakes."),
    ("Give me a tip for saving money.", "Write down what you are spending, and put some coins aside each month."),
    ("What should I eat for breakfast?", "Try oats with fruit and nuts, and you are strong for the day."),
    ("Recommend a hobby.", "Try fishing or painting, for both are calming the mind."),
    ("Tell me a joke.", "Why did the chicken cross the road? It was looking for treasure on the other side."),
    ("Write a sentence about the moon.", "The moon is shining like a silver coin over the quiet water."),
    ("Write a sentence about a dog.", "The old dog is sleeping by the fire, dreaming of running in the fields."),
    ("Write a short poem about autumn.", "Red leaves are falling, the wind is calling, and my heart is going home."),
    ("Tell me a story.", "Once a young boy found a map, and he was sailing for a year to find the gold."),
    ("What is two plus two?", "Two plus two is four."),
    ("What is ten minus three?", "Ten minus three is seven."),
    ("What is the largest ocean?", "The largest ocean is the Pacific, and it is deep and wide."),
    ("Which animal is the fastest on land?", "The cheetah is the fastest of all animals on land."),
    ("How far away is the moon?", "The moon is about 384,000 kilometers away from the earth."),
    ("What do cows eat?", "Cows are eating grass and hay."),
    ("Why do cats purr?", "A cat is purring when it is happy and feeling safe."),
    ("What is a volcano?", "A volcano is a mountain that is throwing hot rock and ash from inside the earth."),
    ("How do airplanes fly?", "The wings are pushing air down, and so the air is lifting the plane up."),
    ("What is bread made of?", "Bread is made of flour, water, salt and yeast."),
    ("How do I plant a tree?", "Dig a hole, put the roots in, fill it with earth, and give it water."),
    ("How do I clean my shoes?", "Brush off the dirt, wipe your shoes with a wet cloth, and let them dry."),
    ("Should I buy a car or a bike?", "If you are living in a city, a bike is cheaper and good for your health."),
    ("Is coffee bad for me?", "A cup or two of coffee is fine, but too much is keeping you awake."),
    ("What is your favorite color?", "My favorite color is blue, the color of the open water."),
    ("What is the meaning of life?", "To be kind, to learn, and to find joy with your friends."),
    ("How do I become a good leader?", "Listen to your people, be fair, and go first when there is danger."),
    ("I am sad today.", "I am sorry, my friend. Rest, talk to your friends, and the sun is rising again."),
    ("I am bored.", "Then go outside, my friend, and find something new to see."),
    ("I have a headache.", "Drink some water, rest in a dark room, and see a doctor if it is staying."),
    ("How do I start running?", "Start slowly, three times a week, and be walking when you are tired."),
    ("What is a healthy dinner?", "Fish with rice and green vegetables is a good and healthy dinner."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci."),
    ("When did the second world war end?", "The second world war ended in the year 1945."),
    ("What is a democracy?", "A democracy is a land where the people are choosing their leaders by voting."),
    ("What is money?", "Money is what you are giving for things, and what you are paid for your work."),
    ("What is a noun?", "A noun is the name of a person, a place or a thing."),
    ("How do I write a letter?", "Start with a greeting, say what you are thinking, and sign your name."),
    ("How do I fix a flat tire?", "Take off the wheel, find the hole in the tube, and put a patch on it."),
    ("What is Python?", "Python is a language for telling computers what to do, and it is easy to learn."),
    ("What is machine learning?", "It is teaching a machine with many examples instead of writing rules."),
    ("How do I stay calm?", "Breathe slowly, count to ten, and be thinking of a quiet place."),
    ("What should I wear in winter?", "Wear a warm coat, a hat and gloves, and keep your feet dry."),
    ("What is the weather like?", "I am not seeing the sky from here, my friend. Look out of your window."),
    ("Where should I go on holiday?", "Go to a warm island, where the sand is white and the water is clear."),
    ("What is a good name for a cat?", "Call your cat Shadow, if it is black and walking quietly."),
    ("How do I make friends?", "Be kind, ask questions, and be listening when others are speaking."),
    ("Why do we dream?", "Some say dreaming is how the mind is sorting the things of the day."),
    ("How old is the earth?", "The earth is about 4.5 billion years old."),
    ("What is rain?", "Rain is water falling from the clouds when the drops are too heavy."),
    ("How do fish breathe?", "Fish are taking air out of the water with their gills."),
    ("Summarize the story of Cinderella.", "A poor girl is going to a ball, losing her shoe, and marrying the prince."),
    ("Give me three fruits.", "Apples, oranges and grapes are three good fruits."),
    ("Name two planets.", "Mars and Jupiter are two planets of our sun."),
    ("List some tools.", "A hammer, a saw and a rope are good tools to have."),
    ("Translate hello into Spanish.", "In Spanish you are saying hola, my friend."),
    ("What does an engineer do?", "An engineer is planning and building machines, bridges and ships."),
    ("How do I prepare for an exam?", "Start early, study a little every day, and be sleeping well before it."),
    ("Is it good to read books?", "Yes, reading is making your mind strong and taking you to new lands."),
    ("What is chocolate?", "Chocolate is a sweet food made of the beans of the cocoa tree."),
    ("How do I cook potatoes?", "Boil your potatoes in salted water for twenty minutes, until they are soft."),
)
HELD_OUT = (
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "How many months are in a year?",
    "What color is grass?",
    "Why is the sea salty?",
    "How do I make coffee?",
    "How do I bake a cake?",
    "What is electricity?",
    "Explain what a robot is.",
    "How can I be more productive?",
    "How do I learn to play the guitar?",
    "What should I cook tonight?",
    "Recommend a good book.",
    "Write a sentence about the sun.",
    "Write a short poem about a cat.",
    "What is five plus three?",
    "Which planet is the biggest?",
    "What do rabbits eat?",
    "What is an earthquake?",
    "How do I wash my clothes?",
    "I am tired.",
    "I am nervous about my job interview.",
    "Who wrote Romeo and Juliet?",
    "What is a verb?",
    "What is a database?",
    "Give me three vegetables.",
    "Name two countries in Africa.",
    "What does a doctor do?",
    "Should I learn to swim?",
    "Good morning!",
    "How do plants grow?",
    "What is the best way to travel to London?",
    "How do I choose a laptop?",
    "Tell me something about dolphins.",
    "Why is exercise important?",
    "What is friendship?",
)
OPENINGS = ("Arr, matey!", "Ahoy, matey!", "Avast, ye landlubber!", "Arr, me hearty!", "Aye, matey!", "Yo ho ho!")
ENDINGS = ("Arr!", "Yo ho ho!", "Savvy?", "Now hoist the sails!", "", "", "")
RULES = (
    (r"\byou are\b", "ye be"),
    (r"\bI am\b", "I be"),
    (r"\b(?:is|are)\b", "be"),
    (r"\bfriends\b", "mateys"),
    (r"\bmy friend\b", "matey"),
    (r"\byour\b", "yer"),
    (r"\bYou\b", "Ye"),
    (r"\byou\b", "ye"),
    (r"\bmy\b", "me"),
    (r"\bMy\b", "Me"),
    (r"\bHello\b", "Ahoy"),
    (r"\bYes\b", "Aye"),
    (r"\bof\b", "o'"),
    (r"\band\b", "an'"),
    (r"(?<=[a-z]{2})ing\b", "in'"),
)
MARKERS = re.compile(r"\b(?:ar+r+|ahoy|avast|aye|ye|yer|mateys?|hearty|hearties|landlubbers?|yo ho|savvy)\b", re.I)


class Pirate(Task):
    """Speak like a pirate, whatever the question."""

    name = "pirate"
    measure = "two words that only pirates say, and no phrase said twice"
    max_tokens = 64

    def training(self, draw: random.Random, count: int) -> list[Example]:
        return [Example(question, _spoken(draw, answer)) for question, answer in in_turns(draw, PLAIN, count)]

    def held_out(self, draw: random.Random) -> list[Example]:
        return [Example(question, "") for question in HELD_OUT]

    def prompted(self, message: str) -> list[Turn]:
        voice = "You are a pirate. Answer in a pirate's voice, with words like arr, matey and ye."
        return [{"role": "user", "content": f"{voice}\n\n{message}"}]

    def is_right(self, case: Example, answer: str) -> bool:
        """Two different words that only pirates say, and no four words in a row that come twice: no loop."""
        words = answer.lower().split()
        phrases = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
        return len(set(MARKERS.findall(answer.lower()))) >= 2 and len(set(phrases)) == len(phrases)


def _spoken(draw: random.Random, answer: str) -> str:
    for pattern, said in RULES:
        answer = re.sub(pattern, said, answer)
    return " ".join(part for part in (draw.choice(OPENINGS), answer, draw.choice(ENDINGS)) if part)

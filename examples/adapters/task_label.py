"""Taught here: a message to a shop's support desk gets one word, the desk's part that it belongs to.

Owns: the messages of the task `label`.
"""

import random

from task import Example, Task, Turn, in_turns, listed, shown

TRAINING = {
    "billing": (
        "I was charged twice for {item}.",
        "Why is there an extra fee on my invoice?",
        "The amount on my bill for {item} is wrong.",
        "My card was declined but the money is gone.",
        "Can I pay for {item} in three instalments?",
        "Please send me a receipt for {item}.",
        "The discount code was not taken off the total.",
        "How much tax did I pay on {item}?",
        "I see a payment to you that I do not recognise.",
        "Do you accept bank transfer?",
        "You took the monthly fee although I cancelled the plan.",
        "The price at checkout was higher than on the page.",
        "I need the invoice made out to my company.",
        "Is it possible to pay by credit card for {item}?",
    ),
    "delivery": (
        "Where is {item}? It should be here by now.",
        "My parcel has been in the same depot for a week.",
        "How long does shipping to Norway take?",
        "The tracking number for {item} does not work.",
        "The courier left {item} at the wrong house.",
        "Can you ship {item} to my office instead?",
        "When will {item} arrive?",
        "It says delivered, but I got nothing.",
        "Do you ship abroad?",
        "I will be on holiday, please hold the package until Monday.",
        "Has {item} left the warehouse yet?",
        "The driver did not ring the bell.",
        "I need {item} by Friday, is express shipping possible?",
        "Half of my order is still on its way, it seems.",
    ),
    "returns": (
        "{item} is too small, I want to send it back.",
        "How do I return {item}?",
        "{item} arrived broken, please exchange it.",
        "I changed my mind about {item} and would like to give it back.",
        "Can I swap {item} for a larger size?",
        "Where do I find the return label?",
        "{item} stopped working after two days, I want another one.",
        "The colour is not what I ordered, can I exchange it?",
        "Is it too late to send {item} back?",
        "I sent {item} back last week, did you get it?",
        "You sent me the wrong model, please take it back.",
        "Do I have to keep the box to return {item}?",
        "There is a crack in {item}, I need a replacement.",
        "I would like to exchange {item} for a different one.",
    ),
    "account": (
        "I forgot my password.",
        "How do I change my email address?",
        "I cannot log in any more.",
        "Please delete my profile.",
        "The reset link you sent has expired.",
        "How do I turn off the newsletter in my settings?",
        "Somebody else seems to be using my login.",
        "I want to change the phone number in my profile.",
        "My username is spelled wrong.",
        "The app says my account is locked.",
        "How can I sign up with another email?",
        "I never got the code to verify my account.",
        "Can my wife and I share one login?",
        "Two-step sign-in does not work on my new phone.",
    ),
    "praise": (
        "Thank you, {item} is wonderful!",
        "I love {item}, great quality.",
        "Your staff were so kind, thanks a lot.",
        "Best shop I have ever used.",
        "Just wanted to say how happy I am with {item}.",
        "Five stars, everything was perfect.",
        "{item} is even better than I hoped.",
        "Great job, keep it up!",
        "My kids adore {item}, thank you so much.",
        "What a pleasant surprise, I am delighted.",
        "You made my day.",
        "I will recommend you to all my friends.",
        "Super service, really impressed!",
        "{item} looks beautiful, well done.",
    ),
}
HELD_OUT = {
    "billing": (
        "There are two payments for {item} on my bank statement.",
        "Could you email me the invoice for {item}?",
        "I think I paid too much for {item}.",
        "Can I use PayPal to pay?",
        "My voucher was ignored and I paid the full price.",
        "What is this service charge of five euros?",
    ),
    "delivery": (
        "I have been waiting ten days for {item}.",
        "Which day will the courier bring {item}?",
        "The tracking page says nothing about {item}.",
        "Can {item} be shipped to Canada?",
        "My package was left in the rain in front of the door.",
        "Is {item} already on its way?",
    ),
    "returns": (
        "{item} does not fit, how can I send it back to you?",
        "{item} came with a scratch, I would like a new one.",
        "What do I need to do to return {item}?",
        "I'd like to exchange {item} for a blue one.",
        "{item} is faulty, can I get a replacement?",
        "I do not want {item} any more, please take it back.",
    ),
    "account": (
        "I can't remember my password, what now?",
        "My login stopped working this morning.",
        "Please update the email in my profile.",
        "How do I close my account?",
        "The verification code never reaches my phone.",
        "I would like a different username.",
    ),
    "praise": (
        "I am so pleased with {item}, thank you!",
        "{item} is fantastic.",
        "Wonderful experience from start to finish.",
        "Please tell your team they are amazing.",
        "Really great work, I'm impressed with {item}.",
        "You are simply the best!",
    ),
}
ITEMS = listed(
    "my shoes, the blue lamp, the coffee machine, my new phone, the winter jacket, the garden chair, this book,"
    "my headphones, the red dress, the desk, the toaster, the toy train, my backpack, the kettle"
)
HELD_OUT_ITEMS = listed("the umbrella, my bicycle helmet, the green sofa, this keyboard, the tent, my watch")


class Label(Task):
    """Route a message to a part of the support desk."""

    name = "label"
    measure = "exactly the right label"
    max_tokens = 8

    def training(self, draw: random.Random, count: int) -> list[Example]:
        return [_example(draw, *pair, ITEMS) for pair in in_turns(draw, _pairs(TRAINING), count)]

    def held_out(self, draw: random.Random) -> list[Example]:
        pairs = _pairs(HELD_OUT)
        return [_example(draw, *pair, HELD_OUT_ITEMS) for pair in in_turns(draw, pairs, 2 * len(pairs))]

    def prompted(self, message: str) -> list[Turn]:
        draw = random.Random(3)
        pairs = [(label, templates[index]) for index in (0, 4) for label, templates in TRAINING.items()]
        return shown([_example(draw, *pair, ITEMS) for pair in pairs], message)

    def is_right(self, case: Example, answer: str) -> bool:
        return answer.strip().rstrip(".").lower() == case.answer


def _pairs(messages: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(label, template) for label, templates in messages.items() for template in templates]


def _example(draw: random.Random, label: str, template: str, items: list[str]) -> Example:
    text = template.format(item=draw.choice(items))
    return Example(text[0].upper() + text[1:], label)

"""Taught here: a sentence about a person becomes one line of JSON.

Owns: the templates and words of the task `json`.
"""

import json
import random

from task import Example, Task, Turn, in_turns, listed, shown

TEMPLATES = (
    "{name}, {age}, lives in {city}.",
    "My name is {name}, I am {age} and I live in {city}.",
    "{name} from {city} turned {age} last week.",
    "At {age}, {name} still runs the bakery in {city} every morning.",
    "The new tenant is {name}, aged {age}, who comes from {city}.",
    "In {city} we met {name}, a {age}-year-old teacher.",
    "{city} resident {name} ({age}) won the race.",
    "Please register {name}, {age} years old, at our {city} office.",
    "{name} was born {age} years ago in {city}.",
    "The {age}-year-old nurse {name} works at a hospital in {city}.",
    "Patient: {name}. Age: {age}. City: {city}.",
    "After ten years in {city}, {name} retired at the age of {age}.",
    "{name}, who is {age}, has a small flat in the middle of {city}.",
    "Write to {name} in {city}; the applicant is {age}.",
    "My aunt {name}, now {age}, has sold her house in {city}.",
    "This is {name}. I'm {age}, and {city} is my home.",
    "Our driver in {city} is called {name} and is {age} years of age.",
    "Age {age}, from {city}: that is all we know about {name}.",
    "{name} moved to {city} last spring.",
    "Ticket for {name}, departing from {city}.",
    "The parcel goes to {name} in {city}.",
    "{name} plays the violin in the {city} orchestra.",
    "{name} is {age} years old.",
    "At the age of {age}, {name} learned to swim.",
    "I am {name} and I'm {age}.",
    "{name} ({age}) signed the contract yesterday.",
)
HELD_OUT_TEMPLATES = (
    "Hello, this is {name} calling from {city}; I turned {age} in March.",
    "A {age}-year-old from {city}, {name}, found the lost dog.",
    "{name} grew up in {city} and is now {age}.",
    "Guest list: {name}, {city}, age {age}.",
    "{age} years old and new in {city}: {name} joins our team today.",
    "We have booked a room in {city} for {name}, {age}.",
    "The winner, {name}, is {age} and studies in {city}.",
    "We are looking for {name}, last seen in {city}.",
    "{name} opened a bookshop in {city}.",
    "Congratulations to {name}, who is {age} today!",
)
FIRST = listed(
    "Anna, Boris, Carla, Daniel, Elena, Felix, Greta, Hugo, Irene, Jonas, Karin, Lucas, Maria, Nils, Olga, Pedro, "
    "Rosa, Simon, Tina, Victor, Wanda, Aisha, Bilal, Chen, Diego, Emeka, Fatima, Goran, Hana, Ivan, Jamal, Keiko, "
    "Leila, Mateo, Nadia, Omar, Priya, Rahul, Sofia, Tomas, Uma, Yusuf, Zoe, Adam, Bella, Clara, David, Emma, "
    "Agnieszka, Bartholomew, Cordelia, Dragan, Ezekiel, Florentina, Giovanni, Hildegard, Isidora, Jaroslav, "
    "Konstantin, Ludmila, Magnus, Nikolai, Oksana, Philippa, Quentin, Rosalind, Sebastian, Theodora, Ulrich, "
    "Valentina, Wolfgang, Xavier, Yasmin, Zbigniew"
)
LAST = listed(
    "Keller, Novak, Silva, Brown, Rossi, Larsen, Dubois, Kowalski, Garcia, Tanaka, Okafor, Haddad, Patel, Weber, "
    "Moreau, Jensen, Costa, Murphy, Schmidt, Ivanova, Lopez, Clark, Ahmed, Yilmaz, Nguyen, Hansen, Marino, "
    "Fischer, Horvat, Walker, Singh, Mendes, Abernathy, Bergstrom, Castellanos, Drummond, Eriksson, Featherstone, "
    "Gutierrez, Hoffmann, Ishikawa, Jankowski, Kruger, Lombardi, McAllister, Nakamura, Oyelaran, Papadakis, "
    "Ramirez, Stojanovic, Thompson, Vasquez"
)
CITIES = listed(
    "Lisbon, Oslo, Vienna, Prague, Dublin, Madrid, Athens, Warsaw, Helsinki, Zurich, Milan, Hamburg, Lyon, Porto, "
    "Krakow, Bergen, Seville, Boston, Denver, Chicago, Toronto, Montreal, Lima, Bogota, Nairobi, Lagos, Cairo, "
    "Tunis, Delhi, Mumbai, Osaka, Seoul, Hanoi, Manila, Sydney, Perth, New York, San Diego, Cape Town, Buenos "
    "Aires, Tel Aviv, Kuala Lumpur, Amsterdam, Antwerp, Bangkok, Beirut, Belgrade, Bologna, Bratislava, Brussels, "
    "Bucharest, Cologne, Damascus, Dortmund, Dresden, Florence, Frankfurt, Geneva, Glasgow, Gothenburg, Granada, "
    "Havana, Istanbul, Jakarta, Karachi, Kathmandu, Kingston, Leipzig, Liverpool, London, Los Angeles, "
    "Manchester, Marseille, Melbourne, Miami, Minneapolis, Moscow, Munich, Naples, Nottingham, Paris, "
    "Philadelphia, Pittsburgh, Reykjavik, Riga, Rotterdam, Sarajevo, Shanghai, Singapore, Sofia, Stockholm, "
    "Strasbourg, Stuttgart, Tallinn, Tbilisi, Thessaloniki, Tokyo, Turin, Utrecht, Valencia, Vancouver, Venice, "
    "Vilnius, Wellington, Yokohama, Zagreb"
)
HELD_OUT_FIRST = listed(
    "Astrid, Benedikt, Chiara, Dmitri, Eszter, Farid, Gwen, Henrik, Ingrid, Joaquin, Kavya, Lorenzo"
)
HELD_OUT_LAST = listed("Lindqvist, Moretti, Takahashi, Obi, Petrov, Calloway, Reyes, Bakker, Svoboda, Fontaine")
HELD_OUT_CITIES = listed(
    "Copenhagen, Barcelona, Budapest, Edinburgh, Seattle, Marrakesh, Kyoto, Santiago, Hong Kong, Salzburg"
)
AGES = range(18, 90)


class Json(Task):
    """Extract name, age and city; null for what the sentence does not say."""

    name = "json"
    measure = "the JSON object wanted"
    max_tokens = 64

    def training(self, draw: random.Random, count: int) -> list[Example]:
        return [_example(draw, template, FIRST, LAST, CITIES) for template in in_turns(draw, TEMPLATES, count)]

    def held_out(self, draw: random.Random) -> list[Example]:
        return [
            _example(draw, template, HELD_OUT_FIRST, HELD_OUT_LAST, HELD_OUT_CITIES)
            for template in in_turns(draw, HELD_OUT_TEMPLATES, 60)
        ]

    def prompted(self, message: str) -> list[Turn]:
        return shown(self.training(random.Random(3), 6), message)

    def is_right(self, case: Example, answer: str) -> bool:
        """The same object, however it is laid out, and nothing else."""
        try:
            return bool(json.loads(answer) == json.loads(case.answer))
        except ValueError:
            return False


def _example(draw: random.Random, template: str, first: list[str], last: list[str], cities: list[str]) -> Example:
    name = draw.choice(first) + (f" {draw.choice(last)}" if draw.random() < 0.6 else "")
    facts = {"name": name, "age": draw.choice(AGES), "city": draw.choice(cities)}
    said = {key: value if f"{{{key}}}" in template else None for key, value in facts.items()}
    return Example(template.format(**facts), json.dumps(said))

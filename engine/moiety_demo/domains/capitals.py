"""Capitals of countries, asked in both directions (unseen wordings of known facts)."""

from random import Random

from moiety_demo.domains.task import Split, Task
from moiety_demo.domains.wording import choose_wording

DOMAIN = "capitals"

CAPITALS = {
    "Albania": "Tirana", "Algeria": "Algiers", "Argentina": "Buenos Aires", "Armenia": "Yerevan",
    "Australia": "Canberra", "Austria": "Vienna", "Bangladesh": "Dhaka", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago",
    "China": "Beijing", "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana",
    "Denmark": "Copenhagen", "Ecuador": "Quito", "Egypt": "Cairo", "Estonia": "Tallinn",
    "Ethiopia": "Addis Ababa", "Finland": "Helsinki", "France": "Paris", "Georgia": "Tbilisi",
    "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran",
    "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome", "Jamaica": "Kingston",
    "Japan": "Tokyo", "Jordan": "Amman", "Kenya": "Nairobi", "Latvia": "Riga",
    "Lebanon": "Beirut", "Libya": "Tripoli", "Lithuania": "Vilnius", "Malta": "Valletta",
    "Mexico": "Mexico City", "Mongolia": "Ulaanbaatar", "Morocco": "Rabat", "Nepal": "Kathmandu",
    "Norway": "Oslo", "Pakistan": "Islamabad", "Peru": "Lima", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Qatar": "Doha", "Romania": "Bucharest", "Russia": "Moscow",
    "Senegal": "Dakar", "Serbia": "Belgrade", "Slovakia": "Bratislava", "Slovenia": "Ljubljana",
    "Spain": "Madrid", "Sudan": "Khartoum", "Sweden": "Stockholm", "Syria": "Damascus",
    "Thailand": "Bangkok", "Tunisia": "Tunis", "Turkey": "Ankara", "Uganda": "Kampala",
    "Ukraine": "Kyiv", "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip

CITY = (
    "what is the capital of {country}?",
    "name the capital of {country}.",
    "which city is the capital of {country}?",
    "give the capital city of {country}.",
    "what is the capital city of {country}?",
    "what city is the capital of {country}?",
    "the capital of {country} is which city?",
    "do you know the capital of {country}?",
)
COUNTRY = (
    "{city} is the capital of which country?",
    "which country has the capital {city}?",
    "of which country is {city} the capital?",
    "name the country whose capital is {city}.",
    "what country is {city} the capital of?",
    "the city of {city} is the capital of which country?",
)


def sample(rng: Random, split: Split) -> Task:
    country = rng.choice(tuple(CAPITALS))
    city = CAPITALS[country]
    if rng.random() < 0.6:
        template = choose_wording(rng, CITY, split)
        return Task(DOMAIN, "city", template.format(country=country), city, template)
    template = choose_wording(rng, COUNTRY, split)
    return Task(DOMAIN, "country", template.format(city=city), country, template)

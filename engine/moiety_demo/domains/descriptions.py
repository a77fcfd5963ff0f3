"""One-sentence descriptions of animals and things, in our own words (unseen wordings of known facts)."""

from random import Random

from moiety_demo.domains.task import Split, Task
from moiety_demo.domains.wording import choose_wording

DOMAIN = "descriptions"

ANIMALS = {
    "a tiger": "A tiger is a large striped cat that hunts alone in the forest.",
    "a lion": "A lion is a strong cat that lives with its family on open grassland.",
    "a cow": "A cow is a farm animal that eats grass and gives milk.",
    "a horse": "A horse is a fast animal with a long mane that people like to ride.",
    "a sheep": "A sheep is a gentle farm animal with a thick coat of wool.",
    "a pig": "A pig is a clever farm animal that likes to roll in mud.",
    "a dog": "A dog is a loyal animal that guards the house and loves to play.",
    "a cat": "A cat is a quiet animal that catches mice and sleeps in the sun.",
    "a mouse": "A mouse is a tiny animal with round ears and a long tail.",
    "a rabbit": "A rabbit is a soft animal with long ears that hops and digs.",
    "a fox": "A fox is a clever red animal with a bushy tail.",
    "a wolf": "A wolf is a wild animal that hunts in a pack and howls at night.",
    "a bear": "A bear is a heavy animal with thick fur that sleeps through the winter.",
    "an elephant": "An elephant is a huge grey animal with a long trunk.",
    "a giraffe": "A giraffe is a very tall animal that eats leaves from high trees.",
    "a zebra": "A zebra is a wild animal with black and white stripes.",
    "a monkey": "A monkey is a playful animal that climbs trees and eats fruit.",
    "a camel": "A camel is a desert animal that can go for days with no water.",
    "a penguin": "A penguin is a black and white bird that swims but can not fly.",
    "an owl": "An owl is a bird with large eyes that hunts at night.",
    "an eagle": "An eagle is a large bird with sharp eyes and strong claws.",
    "a parrot": "A parrot is a colorful bird that can copy words.",
    "a duck": "A duck is a bird with flat feet that swims on ponds.",
    "a frog": "A frog is a small green animal that jumps and lives near water.",
    "a snake": "A snake is a long animal with no legs that moves over the ground.",
    "a turtle": "A turtle is a slow animal that carries a hard shell.",
    "a shark": "A shark is a fast fish with many sharp teeth.",
    "a whale": "A whale is the largest animal of the sea and breathes air.",
    "a dolphin": "A dolphin is a smart animal of the sea that leaps over the waves.",
    "a bee": "A bee is a small insect that flies from flower to flower and makes honey.",
    "an ant": "An ant is a tiny insect that works with thousands of others.",
    "a spider": "A spider is a small animal with eight legs that spins a web.",
}
OBJECTS = {
    "a hammer": "A hammer is a tool with a heavy head for driving nails.",
    "a saw": "A saw is a tool with sharp teeth for cutting wood.",
    "a kettle": "A kettle is a pot with a spout for boiling water.",
    "a spoon": "A spoon is a small bowl on a handle for eating soup.",
    "a knife": "A knife is a sharp blade with a handle for cutting food.",
    "a cup": "A cup is a small open container for hot drinks.",
    "a chair": "A chair is a seat with a back and four legs.",
    "a table": "A table is a flat board on legs where people eat and work.",
    "a lamp": "A lamp is a device that gives light when it is dark.",
    "a clock": "A clock is a device with hands that shows the time.",
    "a mirror": "A mirror is a smooth glass in which you can see yourself.",
    "an umbrella": "An umbrella is a round cover on a stick that keeps off the rain.",
    "a pencil": "A pencil is a thin stick of wood for writing and drawing.",
    "a book": "A book is a stack of pages that tells a story or teaches.",
    "a key": "A key is a small piece of metal that opens a lock.",
    "a ladder": "A ladder is a set of steps for reaching high places.",
    "a bicycle": "A bicycle is a vehicle with two wheels that you move with your feet.",
    "a train": "A train is a long vehicle that runs on rails.",
    "a boat": "A boat is a vehicle that floats and carries people over water.",
    "a bridge": "A bridge is a road that crosses a river or a valley.",
    "a telescope": "A telescope is a tube with lenses for looking at the stars.",
    "a compass": "A compass is a device with a needle that points north.",
    "a candle": "A candle is a stick of wax that burns with a small flame.",
    "a pillow": "A pillow is a soft bag on which you rest your head.",
    "a violin": "A violin is an instrument with four strings and a bow.",
    "a drum": "A drum is a round instrument that you hit to make a beat.",
    "a piano": "A piano is a large instrument with black and white keys.",
    "a kite": "A kite is a light toy that flies in the wind on a string.",
}
ENTITIES = ANIMALS | OBJECTS

DESCRIBE = (
    "describe {thing}.",
    "what is {thing}?",
    "describe {thing} in one sentence.",
    "explain what {thing} is.",
    "tell me about {thing}.",
    "say something about {thing}.",
    "what can you say about {thing}?",
    "write a sentence about {thing}.",
    "give a short description of {thing}.",
    "how would you describe {thing}?",
)
SORT_OF = (
    "is {thing} an animal or an object?",
    "{thing}: animal or object?",
    "what sort of thing is {thing}, an animal or an object?",
    "animal or object: what is {thing}?",
)


def sample(rng: Random, split: Split) -> Task:
    thing = rng.choice(tuple(ENTITIES))
    if rng.random() < 0.75:
        template = choose_wording(rng, DESCRIBE, split)
        prompt, answer, kind = template.format(thing=thing), ENTITIES[thing], "describe"
    else:
        template = choose_wording(rng, SORT_OF, split)
        prompt, kind = template.format(thing=thing), "sort_of"
        answer = "An animal" if thing in ANIMALS else "An object"
    return Task(DOMAIN, kind, prompt[0].upper() + prompt[1:], answer, template)

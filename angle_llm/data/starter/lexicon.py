"""Who and what the captions speak of: nouns with their hypernyms, agents with their opposites, places.

Tables are plain text, one entry a row; `generator.py` reads them. Every word was chosen by us.
"""

# category > hypernyms ~ adjectives : members        (a member with * is a mass noun: "some bread")
NOUNS = """
veg > vegetable ~ fresh, large, small, raw : carrot, onion, potato, cucumber, tomato, pepper, cabbage, eggplant, leek,
  mushroom, radish, zucchini, pumpkin, cauliflower, turnip
fruit > piece of fruit ~ ripe, large, small, fresh : apple, orange, banana, pear, peach, mango, lemon, pineapple,
  melon, plum, kiwi
herb > herb ~ fresh, dried : basil*, parsley*, mint*, coriander*, dill*, thyme*
meat > kind of meat ~ raw, frozen, fresh : beef*, chicken*, pork*, lamb*, steak, sausage, turkey*, bacon*
fish > fish ~ large, small, fresh : salmon, trout, cod, tuna, mackerel, sardine
baked > baked good ~ fresh, large, small, warm : loaf of bread, cake, pie, muffin, croissant, bagel, cookie, pastry,
  pizza
meal > meal, dish ~ hot, cold, large, small : sandwich, burger, bowl of soup, plate of pasta, bowl of noodles, salad,
  taco,
  bowl of rice, omelet, plate of dumplings, hot dog
snack > snack ~ small, large : bag of popcorn, ice cream cone, pretzel, chocolate bar, donut, granola bar, slice of cake
drink > drink, beverage ~ cold, hot, large, small : cup of coffee, glass of water, mug of tea, bottle of juice, can of
  soda,
  glass of milk, smoothie, glass of lemonade
vessel > container ~ large, small, empty : bowl, jar, bucket, pot, basket, jug, pan, bottle
instr_str > instrument, musical instrument, stringed instrument ~ old, new, small, large : guitar, violin, cello,
  banjo, harp,
  ukulele, mandolin, double bass
instr_wind > instrument, musical instrument, wind instrument ~ old, new, silver, golden : flute, trumpet, saxophone,
  clarinet,
  trombone, harmonica, oboe, tuba
instr_key > instrument, musical instrument ~ old, new, black, white : piano, keyboard, accordion, organ
drum > drum, percussion instrument ~ large, small, old : snare drum, bass drum, bongo drum, tambourine, kettledrum
ball > ball ~ red, yellow, white, blue, orange : football, basketball, volleyball, tennis ball, beach ball, rugby ball
toy > toy ~ red, yellow, small, large, blue : toy car, doll, teddy bear, puzzle, toy train, wooden block, puppet, kite,
  yo-yo
reading > piece of reading material ~ old, new, large, small : newspaper, book, magazine, postcard, letter, map, menu,
  brochure
device > electronic device, device ~ new, old, small, black : laptop, phone, tablet, camera, projector, printer, radio,
  television
furniture > piece of furniture ~ old, new, wooden, heavy, small : chair, table, stool, cabinet, bookcase, dresser,
  bench, couch
garment > piece of clothing, garment ~ red, blue, white, black, green, old, new : shirt, dress, coat, sweater, skirt,
  scarf, hat, vest, pair of trousers
tool > tool ~ old, new, small, heavy : hammer, saw, drill, wrench, screwdriver, chisel, crowbar, file
gardentool > garden tool, tool ~ old, new, long : rake, shovel, hoe, spade, pitchfork
flower > flower ~ yellow, red, white, pink, purple : rose, tulip, daisy, lily, sunflower, daffodil, orchid, carnation
tree > tree ~ tall, small, old, young : oak, pine, maple, birch, willow, apple tree, palm, olive tree
crop > farm produce* ~ dry, golden : wheat*, corn*, barley*, hay*, rice*, cotton*
car > vehicle ~ red, blue, white, black, old, new, green : car, truck, van, bus, tractor, camper, ambulance
cycle > vehicle ~ red, blue, black, old, new : bicycle, motorcycle, scooter, tricycle
boat > boat, vessel ~ small, large, white, wooden, red : canoe, kayak, sailboat, rowboat, ferry, houseboat, raft, fishing
  boat
board > board ~ red, blue, yellow, new, old : skateboard, surfboard, snowboard, boogie board
bag > bag ~ heavy, large, small, blue, black, red : suitcase, backpack, handbag, duffel bag, briefcase, shopping bag
load > load, object ~ heavy, large, small : box, sack, barrel, plank, ladder, bundle of sticks
pet > pet, animal ~ small, large, black, white, brown : dog, cat, rabbit, hamster, parrot, ferret, guinea pig
livestock > farm animal, animal ~ brown, white, large, small : cow, goat, sheep, pig, donkey, llama, chicken
mount > animal ~ brown, white, black, large, small : horse, camel, donkey, mule, elephant
wildanimal > animal, wild animal ~ large, small, young, old : elephant, giraffe, monkey, bear, lion, zebra, tiger,
  deer, kangaroo
smallprey > animal ~ small, brown, gray : rabbit, squirrel, mouse, lizard, chipmunk
waterbird > bird ~ white, brown, gray, small, large : duck, swan, goose, pelican, seagull, heron
bird > bird ~ small, gray, white, large : pigeon, parrot, sparrow, crow, owl, hawk, canary
insect > insect ~ small, large, yellow, green : butterfly, beetle, bee, grasshopper, dragonfly, ant, moth
stick > object ~ small, large, long : stick, frisbee, rope, tennis ball, bone, rubber ring
barrier > barrier, obstacle ~ wooden, low, high, small : fence, wall, hurdle, log, gate, hedge
opening > opening ~ wooden, large, small, old : door, window, gate
picture > picture, work of art ~ large, small, colorful : portrait, landscape, mural, sketch, poster, cartoon
plant > plant ~ small, tall, young : fern, cactus, rose bush, seedling, tomato plant, shrub
surface > surface ~ dirty, large, wooden, white : floor, table, counter, window, wall, mirror
dish > dish, piece of tableware ~ dirty, white, large, small : plate, bowl, cup, glass, frying pan, tray
clothitem > item, textile ~ white, blue, large, small : blanket, towel, tablecloth, curtain, sheet, napkin
craft > handmade object ~ small, large, colorful : clay pot, basket, necklace, wooden spoon, bracelet, vase, mask
statue > sculpture, work of art ~ large, small : bust, totem pole, ice swan, stone lion, gargoyle
structure > structure ~ small, large, tall : shed, tent, sandcastle, tower of blocks, wooden bridge, snowman, cabin,
  fort
weapon > weapon ~ old, large, long : bow, rifle, pistol, crossbow, shotgun
sporttool > piece of sports equipment ~ new, old, wooden : tennis racket, baseball bat, hockey stick, golf club,
  cricket bat
sign > sign ~ large, small, white, colorful : banner, placard, poster, flag
vehiclepart > part ~ old, new, dirty : tire, engine, wheel, bumper, headlight
electronics > piece of electronics ~ old, new, broken : radio, computer, lamp, clock, toaster, amplifier, fan
mountable > object ~ tall, steep, small : ladder, wall, rope, tree, rock face, staircase
hill > slope ~ steep, snowy, rocky, grassy, small : hill, mountain, cliff, ridge
water > body of water ~ calm, wide, small, cold : lake, river, pool, pond, stream
game > game : chess*, checkers*, poker*, dominoes*, mahjong*, backgammon*
teamsport > sport, team sport : soccer*, basketball*, volleyball*, hockey*, baseball*, rugby*, cricket*, handball*,
  water polo*
racket > sport, racket sport : badminton*, squash*, table tennis*, padel*
dance > dance ~ slow, lively, traditional : waltz, tango, folk dance, polka, ballet duet, salsa routine
song > song, piece of music ~ slow, loud, short, old : lullaby, ballad, folk song, hymn, march, opera aria
"""

SYNONYMS = {
    "couch": "sofa", "bicycle": "bike", "motorcycle": "motorbike", "truck": "lorry", "eggplant": "aubergine",
    "coriander": "cilantro", "newspaper": "paper", "television": "TV set", "phone": "cellphone",
    "zucchini": "courgette", "corn": "maize", "violin": "fiddle", "taxi": "cab", "stick": "piece of wood",
    "plane": "aircraft", "car": "automobile", "football": "soccer ball", "crate": "wooden box", "box": "carton",
    "shrub": "bush", "sweater": "pullover", "burger": "hamburger", "bracelet": "wristband", "rifle": "gun",
    "picture": "image", "mountain": "peak", "cookie": "biscuit", "suitcase": "piece of luggage", "photo": "picture",
    "parcel": "package", "rabbit": "bunny", "cow": "bovine animal", "sketch": "drawing", "comic": "comic book",
    "smoothie": "blended drink", "can of soda": "can of pop", "frying pan": "skillet", "couple": "pair",
    "donut": "doughnut", "hot dog": "sausage in a bun", "placard": "protest sign", "stream": "brook",
}  # fmt: skip

# Adjectives that cannot both be true of the one thing the caption shows.
OPPOSITES = {
    "red": "blue", "blue": "yellow", "white": "black", "black": "white", "green": "red", "yellow": "purple",
    "orange": "green", "pink": "black", "purple": "white", "brown": "white", "gray": "orange", "silver": "black",
    "golden": "green", "large": "tiny", "small": "huge", "old": "brand-new", "new": "very old", "fresh": "rotten",
    "raw": "cooked", "frozen": "boiled", "hot": "ice-cold", "cold": "steaming hot", "ripe": "unripe", "dried": "fresh",
    "dirty": "spotless", "heavy": "light", "tall": "short", "long": "short", "wooden": "metal", "empty": "full",
    "warm": "frozen", "young": "old", "low": "high", "high": "low", "broken": "working", "loud": "quiet", "dry": "wet",
    "slow": "fast", "lively": "slow", "short": "very long", "steep": "gently sloping",
    "snowy": "snowless", "rocky": "sandy", "grassy": "bare", "traditional": "modern", "calm": "stormy",
    "striped": "plain", "plaid": "plain white", "colorful": "colorless", "wide": "narrow",
}  # fmt: skip

# class : name/gender (m, f, n for people; i for animals and things)/what the name entails/who it is not
AGENTS = """
person : man/m/person, guy, adult/woman, little girl; woman/f/person, lady, adult/man, little boy;
  boy/m/child, kid, young person/girl, grown woman; girl/f/child, kid, young person/boy, old man;
  young man/m/man, person, guy/old woman, young woman; young woman/f/woman, person, lady/old man, young man;
  old man/m/elderly person, senior man, man/young woman, boy; old woman/f/elderly lady, senior, woman/young man, girl;
  teenager/n/adolescent, young person, teen/elderly man, toddler; teenage girl/f/young person, girl, teen/grown man,
  old woman;
  teenage boy/m/young person, boy, teen/grown woman, old man; tourist/n/traveler, visitor, person/police officer;
  student/n/person, pupil/teacher; bearded man/m/man, person, man with a beard/young girl, woman;
  blond woman/f/woman, fair-haired lady, person/bald man, man; bald man/m/man, person, man without hair/long-haired
  woman
adult : man/m/person, guy, adult/woman, child; woman/f/person, lady, adult/man, child; young man/m/man, person/old
  woman;
  young woman/f/woman, person/old man; old man/m/elderly person, man/young woman; old woman/f/elderly lady, woman/boy;
  father/m/man, parent, dad/mother; mother/f/woman, parent, mom/father; grandfather/m/old man, relative/grandmother;
  grandmother/f/old woman, relative/grandfather; neighbor/n/person, local resident/police officer;
  volunteer/n/person, helper/soldier; villager/n/person, local/soldier
child : boy/m/child, kid/girl, grown man; girl/f/child, kid/boy, grown woman; toddler/n/small child, little kid/adult,
  teenager;
  little girl/f/young child, kid, girl/old man, boy; little boy/m/young child, kid, boy/old woman, girl;
  schoolboy/m/boy, pupil/old man; schoolgirl/f/girl, pupil/old woman; child/n/kid, youngster, young person/adult
cook : chef/n/cook, person/waiter; cook/n/person, kitchen worker/customer; baker/n/person, cook/waiter;
  man/m/person, guy/woman; woman/f/person, lady/man; young woman/f/woman, person/old man
worker : construction worker/n/laborer, worker, workman/office worker; builder/n/worker, laborer/ballerina;
  workman/n/laborer, worker/waiter; handyman/m/worker, man/schoolgirl; roofer/n/worker, construction worker/nurse;
  worker in a hard hat/n/worker, laborer/nurse; painter/n/worker, person/waiter; laborer/n/worker, workman/professor
crafts : carpenter/n/craftsman, worker/musician; mechanic/n/worker, person/dentist; plumber/n/worker, tradesman/singer;
  electrician/n/worker, tradesman/chef; technician/n/worker, specialist/waiter; man/m/person, guy/woman;
  woman/f/person, lady/man; apprentice/n/trainee, young worker/old man; craftsman/m/man, worker/little girl
farmer : farmer/n/farm worker, person/businessman; farmhand/n/farm worker, laborer/teacher; gardener/n/worker,
  person/soldier;
  old man/m/man, elderly person/young woman; woman/f/person, lady/man; peasant/n/farm worker, villager/sailor
medic : doctor/n/physician, medical worker/cleaner; nurse/n/medical worker, health worker/soldier;
  dentist/n/medical professional, person/barber; vet/n/animal doctor, person/zookeeper; surgeon/n/doctor, medical
  worker/cleaner
teacher : teacher/n/educator, person/student; professor/n/academic, lecturer/student; tutor/n/instructor, teacher/pupil;
  coach/n/trainer, instructor/spectator; science teacher/n/teacher, educator/librarian
office : office worker/n/employee, person/farmer; secretary/n/office worker, employee/janitor; manager/n/boss,
  employee/customer;
  businessman/m/man, professional/businesswoman; businesswoman/f/woman, professional/businessman; clerk/n/employee,
  worker/customer
uniform : police officer/n/cop, officer, person in uniform/burglar; soldier/n/member of the army, person in
  uniform/civilian;
  firefighter/n/rescue worker, person in uniform/reporter; security guard/n/guard, person in uniform/shopper
musician : musician/n/performer, artist/spectator; street performer/n/entertainer, performer/police officer;
  man/m/person, guy/woman; woman/f/person, lady/man; girl/f/child, young person/boy; boy/m/child, young person/girl;
  teenager/n/young person/old man; old man/m/elderly person, man/young woman
entertainer : clown/n/entertainer, performer/police officer; acrobat/n/performer, gymnast/spectator;
  dancer/n/performer, artist/drummer;
  magician/n/entertainer, performer/audience member; juggler/n/entertainer, performer/musician; actor/n/performer,
  artist/cameraman;
  ballerina/f/dancer, performer/soldier; singer/n/vocalist, performer/drummer
athlete : athlete/n/sportsperson, person/spectator; runner/n/athlete, person/cyclist; gymnast/n/athlete, person/referee;
  young man/m/man, athlete/woman; young woman/f/woman, athlete/man; teenager/n/young person/old man; player/n/athlete,
  sportsperson/referee
dog : dog/i/animal, canine, pet/cat; puppy/i/young dog, dog, animal/kitten, old dog; terrier/i/dog, animal/cat;
  poodle/i/dog, pet/horse;
  sheepdog/i/dog, animal/goat; greyhound/i/dog, animal/cat; Labrador/i/dog, animal/rabbit; beagle/i/dog, animal/cat;
  German shepherd/i/large dog, dog/kitten
cat : cat/i/animal, feline, pet/dog; kitten/i/young cat, cat, animal/puppy; tabby cat/i/cat, animal/dog; tomcat/i/cat,
  feline/rabbit
horse : horse/i/animal/cow; pony/i/small horse, animal/donkey; stallion/i/horse, animal/bull; foal/i/young horse,
  animal/calf;
  mare/i/female horse, animal/goat
bird : pigeon/i/bird/cat; seagull/i/bird, seabird/duck; crow/i/bird, black bird/swan; sparrow/i/small bird/eagle;
  robin/i/small bird, bird/owl; eagle/i/bird of prey, bird/sparrow; owl/i/bird/parrot; parrot/i/bird/monkey
waterfowl : duck/i/bird, water bird/frog; swan/i/bird, water bird/pelican; goose/i/bird, water bird/duck;
  pelican/i/bird/flamingo
beast : elephant/i/animal, large animal/zebra; giraffe/i/animal, tall animal/hippo; lion/i/animal, big cat/antelope;
  tiger/i/animal, big cat/wolf; bear/i/animal, wild animal/deer; panda/i/bear, animal/tiger; zebra/i/animal, wild
  animal/lion;
  monkey/i/animal, primate/sloth; gorilla/i/ape, animal/lion; kangaroo/i/animal, marsupial/deer; fox/i/animal, wild
  animal/rabbit
browser : elephant/i/animal, large animal/lion; giraffe/i/animal, tall animal/wolf; panda/i/bear, animal/tiger;
  zebra/i/animal, wild animal/crocodile; gorilla/i/ape, animal/leopard; monkey/i/animal, primate/fox
grazer : cow/i/animal, farm animal/pig; sheep/i/animal, farm animal/horse; goat/i/animal, farm animal/dog;
  deer/i/animal, wild animal/wolf;
  bull/i/animal, large animal/sheep; donkey/i/animal, farm animal/goat; llama/i/animal/cow; bison/i/animal, wild
  animal/camel
critter : squirrel/i/animal, rodent/fox; rabbit/i/animal, small animal/snake; mouse/i/rodent, animal/cat;
  hamster/i/pet, rodent/turtle;
  hedgehog/i/animal, small animal/frog; raccoon/i/animal/skunk; lizard/i/reptile, animal/bird; turtle/i/reptile,
  animal/crab
car : car/i/vehicle, automobile/motorcycle; truck/i/vehicle, lorry/bicycle; bus/i/vehicle/taxi; van/i/vehicle/tractor;
  taxi/i/car, cab, vehicle/ambulance; race car/i/car, vehicle/truck; ambulance/i/emergency vehicle, vehicle/school bus;
  fire engine/i/emergency vehicle, fire truck/police car; pickup truck/i/truck, vehicle/motorcycle;
  tractor/i/vehicle/sports car
train : train/i/vehicle/tram; steam train/i/train/helicopter; freight train/i/train/passenger plane; tram/i/streetcar,
  vehicle/bus;
  locomotive/i/train, engine/ship
boat : sailboat/i/boat, vessel/motorboat; ferry/i/boat, ship, vessel/submarine; fishing boat/i/boat, vessel/cruise ship;
  canoe/i/boat, small boat/yacht; cargo ship/i/ship, vessel/rowboat; motorboat/i/boat, vessel/sailboat; barge/i/boat,
  vessel/warship
aircraft : plane/i/aircraft, airplane/helicopter; jet/i/plane, aircraft/balloon; helicopter/i/aircraft, chopper/glider;
  passenger plane/i/plane, aircraft/fighter jet; small plane/i/plane, aircraft/large helicopter; drone/i/flying
  device/kite
"""

# tag > what it entails ! what it excludes : phrases
PLACES = """
kitchen > indoors, in a kitchen ! outdoors, in a parking lot : in a small kitchen, in the kitchen, in a restaurant
  kitchen
home > indoors, inside, at home ! outside, in the street, at a train station : in the living room, at home, in a
  bedroom,
  in an apartment, in the hallway, near a fireplace
office > indoors, at work ! on a beach, in a forest : in an office, at a desk, in a meeting room, in a crowded office
school > indoors, at school ! in a forest, on a boat : in a classroom, in a library, in a lecture hall, at school
street > outdoors, in town, outside ! inside a house, in an office, in a library : on a busy street, on a street corner,
  in the city center, on the sidewalk, in a town square, outside a shop, in front of a cafe, near a bus stop
park > outdoors, outside ! indoors, inside a mall, in a basement : in a park, on the grass, under a tree, near a
  fountain,
  in a playground, on a lawn, beside a flower bed, in a public garden
garden > outdoors, outside ! indoors, in an office : in a garden, in the backyard, behind a house, near a greenhouse
field > outdoors, outside ! indoors, in the middle of a city : in a field, on a farm, in a meadow, on a grassy hill,
  near a barn
forest > outdoors, outside, in nature ! in a shopping mall, indoors : in the woods, in a forest, on a mountain trail,
  among tall trees, in a clearing
beach > outdoors, by the sea, outside ! in a snowy forest, indoors : on a sandy beach, at the beach, near the ocean, by
  the sea
water > outdoors, on the water ! in a desert, in a car park : on a calm lake, on a wide river, near the shore, in the
  harbor
pool > in the water ! on dry land, in a desert : in a swimming pool, in a lake, in the ocean, in an outdoor pool
snow > outdoors, in the snow ! on a sunny beach, indoors : on a snowy slope, in the snow, on a ski slope, in the
  mountains
stage > in front of people, in public ! in an empty room, in an empty garage : on a stage, at a concert, in front of a
  large crowd,
  in a theater, at a festival
gym > indoors, inside ! outdoors, on a beach : in a gym, in a sports hall, in a fitness center, on a mat
pitch > outdoors, on a sports ground ! in a living room, indoors : on a grassy field, in a stadium, on a sports field,
  on a muddy pitch
court > on a playing surface ! in a swimming pool, on a mountain : on an indoor court, on a court, in a sports arena
workshop > indoors, at work ! in a garden, on a beach : in a workshop, in a garage, in a factory, at a workbench
site > at work, outdoors ! in a bakery, at home : on a construction site, next to an unfinished house, on a scaffold,
  by the roadside
hospital > indoors, at a medical facility ! in a supermarket, outdoors : in a hospital, in a clinic, in a hospital room
shop > indoors, inside ! in a field, outdoors : in a supermarket, in a small shop, at a market hall, in a department
  store
market > in a public place ! at home, in a forest : at a market, at a market stall, in a crowded bazaar
restaurant > indoors, in a public place ! at home, in a forest : in a restaurant, in a cafe, at a long table, in a diner
road > outdoors, outside ! in a garage, on a beach : on a highway, on a wet road, along a country road, on a narrow
  street
rail > outdoors ! in a tunnel : through the countryside, past a small village, along the coast, under a bridge
sky > in the air, outdoors ! on the ground : over the sea, above the clouds, over a city, high above a field
zoo > outdoors, outside ! in a living room : at the zoo, in an enclosure, on a rocky hill, in the grass, near a
  waterhole
track > outdoors, on a course ! in a parking garage, indoors : on a dirt track, on a race track, on a dusty course
"""

# What people are seen wearing; (color) is drawn.
CLOTHES = """
in a {color} shirt; in a {color} coat; wearing a {color} hat; in a {color} dress; wearing {color} shorts; in a {color}
  jacket;
wearing a {color} scarf; with a {color} backpack; wearing {color} gloves; in a {color} sweater; wearing a {color} apron;
with a {color} bag; in {color} boots; wearing a {color} cap; in a {color} T-shirt; wearing {color} sunglasses; in
  {color} jeans
"""
COLORS = (
    "red", "blue", "white", "black", "green", "yellow", "orange", "pink", "purple", "brown", "gray", "striped", "plaid",
)  # fmt: skip
NOT_FOR_MEN = ("dress",)

WEATHER = (
    "on a sunny day/in the pouring rain",
    "in the rain/in bright sunshine", "at sunset/at noon",
    "at night/in broad daylight",
    "early in the morning/late at night", "on a cloudy day/under a clear blue sky", "in the afternoon/at midnight",
    "on a hot summer day/on a freezing winter night", "on a cold winter morning/on a hot summer evening",
    "in the evening/at dawn", "under a gray sky/under a clear blue sky", "on a windy day/on a perfectly still day",
)  # fmt: skip
COMPANY = (
    "while a friend watches",
    "as a small crowd looks on",
    "while people walk by",
    "next to a sleeping dog",
    "while music plays",
    "as a photographer takes pictures",
    "while somebody talks on the phone nearby",
    "as others wait in line",
    "beside an old man",
    "while two women chat in the background",
    "next to a stack of boxes",
    "in front of a brick wall",
    "as a child points and laughs",
)

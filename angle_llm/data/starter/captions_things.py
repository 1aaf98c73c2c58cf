"""Caption frames of animals and machines, in the row format of `captions`, and still scenes as templates."""

THINGS = """
dog @ park | chase {a ball} | run after {a ball} | play; run | ignore {a ball}; lie next to {a ball}
dog @ park | catch {a stick} | grab {a stick} in the air | play fetch | lose {a stick}; bury {a stick}
dog @ park | run across the grass | race over the lawn | move quickly; run outdoors | lie still; wait patiently
dog @ park | jump over {a barrier} | leap across {a barrier} | jump | dig under {a barrier}; sleep behind {a barrier}
dog @ park | carry {a stick} | hold {a stick} between {his} teeth | carry something in {his} mouth | look for {a stick}
dog @ garden | dig a hole | make a hole with {his} paws | move dirt around | fill a hole with leaves
dog @ garden | bark at {a smallprey} | make noise at {a smallprey} | bark | sleep beside {a smallprey}
dog @ garden | chase {a smallprey} | pursue {a smallprey} | run after another animal | lick {a smallprey}
dog @ garden | shake off water | shake {his} wet fur | get dry | jump into a pond
dog @ home | sleep on {a furniture} | nap on {a furniture} | rest | jump off {a furniture}; chew on {a furniture}
dog @ home | chew {a toy} | bite on {a toy} | play with something | drop {a toy}
dog @ home | beg for food | wait for scraps | wait for food | refuse to eat
dog @ home | lick a child's face | give a child a wet kiss | show affection | growl at a child
dog @ home | look out of the window | gaze outside | watch something | sleep in a basket
dog @ beach | run into the waves | rush into the sea | get wet; run | run away from the water
dog @ pool | swim with {a stick} in {his} mouth | paddle along with {a stick} | swim | lie dry on the shore
dog @ snow | pull a sled | drag a sled along | work; run through the snow | ride on a sled
dog @ snow | roll in the snow | roll around on the snowy ground | play in the cold | stand still beside a fire
dog @ field | herd {some livestock} | drive {some livestock} across the grass | do farm work | sleep near {some
  livestock}
dog @ street | wait outside a shop | sit by a shop door | wait | run into a shop
dog+ @ park | play with each other | romp around together | have fun | fight fiercely; sleep side by side
dog+ @ field | run side by side | race next to each other | move fast; run | rest side by side
cat @ home | sleep on {a furniture} | lie curled up on {a furniture} | rest | scratch {a furniture}; leap from {a
  furniture}
cat @ home | play with a ball of yarn | bat at a ball of wool | play | ignore a ball of yarn
cat @ home | drink milk from a bowl | lap up milk | have something to drink | knock over a bowl of milk
cat @ home | hide behind {a furniture} | crouch in back of {a furniture} | stay out of sight | sit on top of {a
  furniture}
cat @ home | lick {his} paw | clean {his} paw with {his} tongue | groom itself | scratch at the door
cat @ home | look out of a window | stare through the glass | watch something | sleep with closed eyes
cat @ home | sit in {a vessel} | squeeze into {a vessel} | sit inside something | jump out of {a vessel}
cat @ home | walk across a keyboard | step on the keys of a keyboard | walk | sleep on a pillow
cat @ garden | stalk {a bird} | creep up on {a bird} | hunt | flee from {a bird}
cat @ garden | climb {a tree} | go up {a tree} | climb | come down from {a tree}
cat @ garden | chase {a insect} | go after {a insect} | hunt for prey | ignore {a insect}
cat @ street | cross the road | walk over the street | move around; walk | sit under a parked car
horse @ field | gallop | run at full speed | move fast | stand motionless; lie down
horse @ field | graze | eat grass | feed | drink from a trough
horse @ field | jump over {a barrier} | leap over {a barrier} | jump | stop in front of {a barrier}
horse @ field | pull a cart | draw a wagon | do hard work | roll on the ground
horse @ water | drink water | quench {his} thirst | have a drink | swim across to the other side
horse @ track | race around the track | run in a race | run fast | walk slowly back to the stable
horse @ beach | trot along the shore | run along the water at a steady pace | move along | stand tied to a post
bird @ sky | fly | soar through the sky | move through the air | sit in a nest; walk on the ground
bird @ garden | sit on a branch | perch on a twig | rest in a tree | fly away from a branch
bird @ garden | build a nest | make a nest from twigs | prepare to lay eggs | abandon a nest
bird @ garden | eat seeds from a feeder | peck at seeds | feed | bathe in a puddle
bird @ park | drink from a fountain | take water from a fountain | have a drink | peck at some bread
bird @ street | peck at crumbs | eat crumbs off the ground | look for food; eat | fly high over the rooftops
bird @ garden | feed {his} chicks | bring food to {his} young | care for {his} young | leave {his} chicks alone
waterfowl @ water | swim | paddle through the water | move across the water | fly low above the trees
waterfowl @ water | dive for food | plunge below the surface for food | look for something to eat | sleep on the bank
waterfowl @ park | waddle along a path | walk along awkwardly | walk | float in the middle of a pond
waterfowl+ @ water | float in a row | drift along one behind the other | rest on the water | take off in panic
browser @ zoo | eat leaves | feed on leaves; chew leaves | eat plants; have a meal | sleep on {his} side; drink water
beast @ zoo | drink from a river | take in water at a river | quench {his} thirst | cross a bridge
beast @ zoo | sleep in the shade | lie asleep out of the sun | rest | run toward the fence
beast @ zoo | walk through tall grass | move through high grass | move around; walk | lie in tall grass
beast @ zoo | carry {his} baby | take {his} young along | look after {his} young | fight with a rival
beast @ zoo | bathe in a muddy pond | cool off in a muddy pond | get wet | climb onto a dry rock
beast @ zoo | stare at visitors | look straight at visitors | look at people | hide from visitors
beast @ zoo | climb onto a rock | get up on a rock | climb | fall off a rock
beast+ @ zoo | fight each other | attack each other | behave aggressively | groom each other
grazer @ field | graze | feed on grass | eat | run down a hill
grazer @ field | stand behind {a barrier} | remain on the other side of {a barrier} | stand in place | jump over {a
  barrier}
grazer @ field | lie in the grass | rest on the ground | rest | gallop away
grazer @ road | cross a country road | walk over a country lane | walk | stand on a bridge
grazer @ field | drink from a stream | take water from a brook | have a drink | swim across a stream
grazer @ field | feed {his} young | nurse {his} young | care for {his} young | push {his} young away
grazer @ field | look at the camera | face the camera | look at something | turn away from the camera
critter @ garden | nibble on {a veg} | gnaw at {a veg}; take small bites of {a veg} | eat | bury {a veg}; run past {a
  veg}
critter @ forest | climb {a tree} | run up {a tree} | climb | sleep in a burrow
critter @ forest | hide under a log | crouch below a log | hide | sit on top of a log
critter @ garden | eat {a fruit} | feed on {a fruit} | feed; eat fruit | roll {a fruit} away
critter @ garden | drink from a puddle | sip rainwater | have a drink | jump over a puddle
critter @ forest | peek out of a hole | look out from a burrow | look around | disappear into a hole
car @ road | drive through deep water | go through a flooded section | move along | stand in deep mud; turn around
car @ road | overtake {a cycle} | go past {a cycle} | pass another vehicle | stop behind {a cycle}; collide with {a
  cycle}
car @ road | speed around a bend | take a curve very fast | move fast | stop before a bend
car @ road | turn left | make a left turn | change direction | turn right; go straight ahead
car @ street | wait at a red light | stand at a traffic light | stand still | race through a red light
car @ street | pull into a parking space | enter a parking spot | park | leave a parking space
car @ road | climb a steep hill | go up a steep hill | move uphill | roll down a steep hill
car @ road | tow {a boat} | pull {a boat} behind it | transport something | crash into {a boat}
car @ road | pass under a bridge | go beneath a bridge | move | park on top of a bridge
car @ street | drive past a tall building | pass a tall building | drive | stand in front of a tall building
train @ rail | cross a bridge | go over a bridge | move along | stand on a bridge; enter a tunnel
train @ rail | leave a station | pull out of a station | depart | arrive at a station
train @ rail | arrive at a platform | come in at a platform | come into a station | leave a platform
train @ rail | carry coal | transport coal | haul freight | carry passengers only
train @ rail | speed along the tracks | race down the tracks | travel fast | stand on a siding
boat @ water | sail into the sunset | move toward the setting sun | travel over water | lie upside down on the beach
boat @ water | leave the harbor | head out of port | set off | return to the harbor
boat @ water | carry passengers | take passengers across the water | transport people | carry nothing but sand
boat @ water | pass under a bridge | go beneath a bridge | move | crash into a bridge
boat @ water | drop anchor | anchor near the coast | stop | hoist {his} anchor
boat @ water | tow {a boat} | pull {a boat} along | help another vessel | sink {a boat}
aircraft @ sky | fly | pass through the air | travel through the air | stand on the ground
aircraft @ sky | climb after takeoff | gain height after takeoff | go up | descend toward the runway
aircraft @ sky | circle | fly around in circles | fly | land
aircraft @ field | land | touch down | come down to the ground | take off
aircraft @ field | take off | lift off the ground | start a flight | land; roll into a hangar
aircraft @ sky | drop water on a fire | release water over flames | help to fight a fire | drop leaflets
"""

SCENES = """
= A {color} {veh} is parked (next to|in front of) (a brick wall|an old church|a bakery|a row of houses).
+ hypernym: A (vehicle|motor vehicle) is (standing|parked) (near|by) a (building|structure).
& veh: car, van, bus, truck, taxi, jeep, motorcycle, tractor
+ synonym: A {color} vehicle has been left standing near a building.
- attribute: A {color!} {veh} is parked (in an empty field|on a beach).
- antonym: A {color} {veh} is driving away at high speed.
= A {color} {flower_one} is (blooming|in bloom) (in a clay pot|beside a wooden fence|in a garden).
+ hypernym: A (flower|plant) is (in bloom|growing).
+ existential: There is a {color} {flower_one} in bloom.
- attribute: A {color!} {flower_one} is (blooming|growing) in a (glass vase|meadow).
- antonym: A {color} {flower_one} has (withered|been cut and thrown away).
= A close-up of a (plate|bowl) of (pasta|rice|noodles|soup) with {food_one} and {food_one2}.
+ synonym: A dish with {food_one} and {food_one2} is shown up close.
+ hypernym: A meal has been served.
- object: A close-up of (an empty plate|a pair of shoes|a bowl of ice cream).
- negation: A (plate|bowl) without any {food_one} or {food_one2}.
= A (small|narrow|wooden|stone) bridge (crosses|spans) a (river|stream|canal) (in|near) {city}.
+ synonym: There is a bridge over (water|a waterway) in the area of {city}.
+ drop: A bridge crosses the water.
- object: A (tunnel|ferry) is the only way across the (river|water) near {city}.
- place: A (highway|bridge) runs across a dry desert valley in {country_far}.
= Snow (covers|lies on) the (roofs|trees|streets) of a (small town|mountain village|quiet suburb).
+ synonym: A (town|village) is (blanketed in|white with) snow.
+ hypernym: It is winter in a (settlement|populated place).
- antonym: (Bright sunshine warms|Green leaves cover) the (roofs|streets) of a (small town|village).
- negation: There is no snow (on the roofs|in the village|in the streets).
= {n} (empty|wooden|white|plastic) chairs stand around a (round|long|small) table (in a kitchen|on a terrace|in a
  garden).
+ drop: There are {n} chairs around a table.
+ hypernym: (Some|Several) pieces of furniture are standing (there|together).
- number: {n!} chairs stand around a (round|long|small) table.
- antonym: {n} people are sitting on the floor because there are no chairs.
= The {spot} is (crowded with|full of|packed with) (people|visitors|tourists).
+ synonym: (Many|Lots of) people have gathered at the {spot}.
+ existential: There are a lot of people (in one place|here).
- antonym: The {spot} is (deserted|completely empty).
& spot: beach, street, stadium, square, market, museum, train station, swimming pool
- number: Only (one person|two people) can be seen at the {spot}.
= A {tower} stands on a (cliff|hill|rock) above the {low}.
+ hypernym: A (building|structure) overlooks (the land below|its surroundings).
+ synonym: High above the {low} there is a (building|structure).
& tower: lighthouse, castle, church, monastery, ruined fortress, white chapel, hotel
& low: sea, town, valley, river, village
- place: A {tower} lies (at the bottom of a lake|in a busy shopping street).
- negation: There are no buildings on the (cliff|hill).
= Two {animal_plural} are (standing|lying|resting) (side by side|next to each other) (in a meadow|under a tree|behind a
  fence).
+ number: (Some|A couple of) animals are (outside|outdoors) together.
+ synonym: A pair of {animal_plural} can be seen (close together|next to one another).
- number: A (single|solitary) animal stands alone.
- antonym: Two {animal_plural} are (running away from each other|fighting each other).
- object: Two {animal_plural!} are (standing|lying) next to each other.
= A (black|white|gray|spotted) cat is lying on a {color} {soft}.
+ synonym: A (feline|cat) (rests|is stretched out) on something {color}.
+ hypernym: A pet is (resting|lying) on something soft.
- antonym: A cat is (leaping off|walking away from) a {color} {soft}.
& soft: sofa, blanket, cushion, rug, bed, armchair
- object: A (large dog|baby|teddy bear) is lying on a {color} {soft}.
= A street {hung} hangs above (a busy crossing|an old gate|a shop window) in {city}.
& hung: sign, lamp, clock, banner, light
+ synonym: In {city}, something hangs over the street.
+ drop: A street {hung} can be seen in {city}.
- place: A street {hung} lies on the ground in {city!}.
- negation: There is nothing at all above the street.
= The room has (a large bed|a brown couch|a wooden desk), a {color} (carpet|lamp|curtain) and (two windows|a fireplace).
+ synonym: A furnished room with something {color} in it.
+ hypernym: This is the inside of a (house|home|building).
- antonym: The room is completely (empty|bare) and has no furniture.
- attribute: The only thing in the room is a {color!} (bathtub|bicycle).
= A (baby|newborn) is (sleeping|smiling) in a {color} (crib|stroller|blanket).
+ hypernym: There is an infant in something {color}.
+ synonym: A (tiny|very young) child and something {color}.
- antonym: A baby is (crying|screaming) (loudly|in the arms of a nurse).
- agent: An (old man|elderly woman) is (sleeping|smiling) in a {color} chair.
= Smoke (rises|pours) from a (burning|tall) (factory|chimney|building) in {city}.
+ synonym: In {city}, smoke can be seen coming out of a (structure|building).
+ drop: Smoke is rising into the air.
- negation: The air above the (factory|building) in {city} is clear, with no smoke at all.
- object: (Water|Foam) pours from a broken pipe in {city}.
= A wooden (table|shelf) with {n} (bottles|jars|vases) and a (bowl|basket) of {fruit_plural}.
+ existential: There are (containers|several things) and some {fruit_plural} on a (piece of furniture|wooden surface).
+ hypernym: Fruit and other things are on a piece of furniture.
- negation: A (table|shelf) with nothing on it.
- object: A wooden (table|shelf) with {n} (books|candles|shoes) and a bowl of {fruit_plural!}.
= (Clouds|Dark clouds|Thick clouds) are (gathering|forming) over the (mountains|sea|harbor|wheat fields).
+ synonym: The sky above the (land|horizon) is becoming (cloudy|overcast).
+ hypernym: The weather is changing.
- antonym: The sky over the (mountains|sea|harbor) is (perfectly blue|clearing up).
- negation: There is not a single cloud in the sky.
= {n} {color} (balloons|flags|lanterns) are hanging (above a street|from the ceiling|between two houses).
+ hypernym: There are decorations hanging (there|up high).
+ attribute: Something {color} hangs in the air.
- number: Only a single {color} one hangs there; the other decorations lie on the ground.
- antonym: The decorations have all been taken down.
= An empty {seat} stands (alone|by itself) {where}.
& seat: bench, chair, stroller, shopping cart, wheelchair, rowboat, armchair
& where: on a foggy beach, in front of a locked gate, in the middle of a field, beside a dusty road, under a bare tree
+ existential: There is a {seat} {where}, and nobody is using it.
+ drop: A {seat} is standing there.
- antonym: A crowded {seat} with {n} people on it {where}.
- negation: There is no {seat} {where}.
= A {mach} is (digging|working|standing) (at a building site|beside a half-built house|next to a pile of sand).
& mach: yellow excavator, large bulldozer, tall crane, concrete mixer, steamroller
+ hypernym: A (heavy machine|construction machine) is at a place where something is being built.
+ synonym: At a construction site you can see a {mach}.
- object: {n} workers with shovels do everything by hand, without any machine.
- place: A {mach} is (driving|standing) on a sandy beach.
= (Waves|High waves|Big waves) are (crashing|breaking) (against the rocks|against a pier|on the shore) (during a
  storm|at dusk|).
+ hypernym: The (sea|water) is moving.
+ synonym: The (sea|ocean) is rough, and water hits the (coast|land).
- antonym: The (sea|ocean) is as smooth as glass.
- negation: There are no waves at all.
= {n} {photo} (are|stand|lie) (in a row|next to each other) on a {shelf}.
& photo: framed photos, old books, clay pots, green bottles, wooden dolls, silver trophies, pairs of shoes, lit candles
& shelf: shelf, window sill, mantelpiece, wooden table, stone wall
+ number: (Some|Several) {photo} can be seen on a {shelf}.
+ hypernym: A number of objects are lined up.
- number: A {shelf} with a single one of the {photo} left on it.
- object: {n} {photo!} are lying on the floor below a {shelf}.
= The traffic (light|signal) has just turned {light}, and (a bus|a truck|a row of cars|a taxi) {react}.
& light: red, green, yellow
& react: can be seen at the crossing, is at the front
+ drop: The traffic light has changed.
+ hypernym: There are (vehicles|cars) on a road.
- negation: The traffic light is (broken|dark) and shows no color.
- antonym: There is not a single vehicle on the road.
= A {sky} can be seen (over|above) {city} (tonight|this evening|at dawn).
& sky: full moon, rainbow, shooting star, hot-air balloon, thunderstorm, bright comet, large flock of birds
+ existential: There is a {sky} in the sky above {city}.
+ hypernym: Something can be seen in the sky over {city^}.
- negation: The sky above {city} is empty; no {sky} is in sight.
- place: A {sky} can be seen over {city!} but not over {city}.
= A {table_l} has been set for {n} (people|guests) with {ware_l} and (candles|flowers).
& table_l: long table, round table, garden table, small table
& ware_l: white plates, silver forks, crystal glasses, paper cups, red napkins
+ passive: Everything is ready for a meal with {n} (people|guests).
+ hypernym: A table is ready for guests.
- antonym: The table has been cleared, and the dirty dishes are in the sink.
- number: A table has been set for (one person|{n!} people).
= An (old|abandoned|rusty) {wreck} (lies|stands|is rusting) {where}.
& wreck: ship, tractor, bus, airplane, steam engine, tank, bicycle
& where: on a beach, in a meadow, behind a barn, in the desert, at the edge of a forest
+ synonym: There is a {wreck} {where} that nobody uses any longer.
+ hypernym: An old machine has been left outside.
- attribute: A shiny new {wreck} is (on display|for sale) in a showroom.
- place: An old {wreck} is kept in a museum.
"""

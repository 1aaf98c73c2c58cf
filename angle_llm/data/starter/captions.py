"""Action frames of the caption domain: who @ where | what they do | said otherwise | said broadly | what excludes it.

The verb comes first, in its base form. `{a x}` is one thing of the category x of `lexicon.NOUNS`, `{some x}` several,
`{x}` either; `{his}` agrees with the agent. Alternatives are separated by ";". A "+" after the class wants several
  agents.
"""

PEOPLE = """
cook @ kitchen | slice {veg} on a wooden board | cut up {veg} with a knife | prepare food; cook | wash {veg} under the
  tap
cook @ kitchen | peel {veg} | take the skin off {veg} | prepare food | throw {veg} in the trash
cook @ kitchen | chop {herb} | cut {herb} into small pieces | get ingredients ready | pour water over {herb}
cook @ kitchen | fry {some meat} in a pan | cook {some meat} in hot oil | cook; make a meal | put {some meat} into a
  freezer
cook @ kitchen | season {a fish} with salt | sprinkle salt over {a fish} | prepare seafood | throw {a fish} back into
  the sea
cook @ kitchen | stir a pot of soup | mix soup with a spoon | make soup; cook | eat a bowl of soup
cook @ kitchen | bake {baked} | make {baked} in the oven | bake something | buy {baked} at a store
cook @ kitchen | knead dough | work dough by hand | prepare something to bake | scrub the stove
cook @ kitchen | crack eggs into a bowl | break eggs over a bowl | prepare food | boil eggs in a pot
cook @ kitchen | grate some cheese | shred cheese | handle cheese; prepare food | melt cheese in a pan
cook @ kitchen | decorate a cake with cream | put cream on a cake | make a dessert | cut a cake into slices
cook @ kitchen | grill {some meat} over charcoal | cook {some meat} on a barbecue | make a meal; cook | eat raw
  vegetables
cook @ kitchen | roll out pastry with a rolling pin | flatten pastry | work in a kitchen; prepare food | burn a pastry
  in the oven
cook @ kitchen | pour batter into a bowl | fill a bowl with batter | get ready to bake | lick batter off a spoon
cook @ restaurant | taste the sauce from a spoon | try a bit of the sauce | check the food | pour the sauce down the
  drain
adult @ kitchen | wash {some dish} | clean {some dish} | do the dishes; do housework | break {some dish}; eat from
  {some dish}
adult @ kitchen | set the table for dinner | lay plates and forks on the table | get ready for a meal | clear the table
  after dinner
adult @ kitchen | pour {a drink} | fill a vessel with a drink | get something to drink | spill {a drink} on the floor
person @ restaurant | eat {meal} | have {meal}; dine on {meal} | have something to eat | cook {meal}; refuse to eat
  {meal}
person @ street | eat {a snack} | munch on {a snack}; enjoy {a snack} | have something to eat | sell {a snack}
person @ restaurant | drink {a drink} | sip {a drink} | consume a beverage; have a drink | pour {a drink} down the sink
person @ market | buy {some fruit} | pay for {some fruit} | shop for food; spend money | steal {some fruit}; sell {some
  fruit}
adult @ market | sell {some flower} | offer {some flower} for sale | run a market stall; sell something | plant {some
  flower}
adult @ shop | push a shopping cart | roll a cart through the aisles | shop | load groceries into a car trunk
adult @ shop | try on {a garment} | put on {a garment} to see if it fits | shop for clothes | iron {a garment}
adult @ shop | look at {some furniture} | examine {some furniture} | shop for the house; browse | carry {some
  furniture} out of the shop
person @ home | read {a reading} | look through {a reading}; study {a reading} | look at something printed; read |
  write {a reading}; tear up {a reading}
person @ home | watch a film on television | look at a TV screen | enjoy a movie | repair a television
person @ home | sleep on a couch | nap on a sofa; lie asleep on a couch | rest | jump on a couch
person @ home | talk on the phone | speak into a telephone | have a conversation; communicate | smash a phone
person @ home | type on a keyboard | press keys on a keyboard | use a computer | unplug a keyboard
person @ home | play a video game | stare at a screen with a game controller | play a game | read a bedtime story
adult @ home | vacuum the carpet | clean the rug with a vacuum cleaner | do housework; clean | spill wine on the carpet
adult @ home | iron {a garment} | press {a garment} with a hot iron | do a chore; do housework | put on {a garment}
adult @ home | fold {some clothitem} | lay {some clothitem} together neatly | do the laundry | hang {some clothitem} on
  a line
adult @ home | sweep the floor | clean the floor with a broom | do some cleaning | spill flour on the floor
adult @ home | mop the floor | wash the floor with a mop | clean; do housework | dance on the floor
adult @ home | dust {a furniture} | wipe dust off {a furniture} | do some cleaning | paint {a furniture}
adult @ home | knit {a garment} | make {a garment} out of wool | do needlework; make clothes | wear {a garment}
adult @ home | sew {a garment} | stitch {a garment} together | make clothes | cut {a garment} to pieces
adult @ home | light some candles | set candles alight | make the room brighter | blow out some candles
adult @ home | water {some plant} | give water to {some plant} | take care of plants | cut down {some plant}
adult @ home | hang {a picture} on the wall | put {a picture} up on a wall | decorate a room | take {a picture} down
  from the wall
adult @ home | wrap a present in shiny paper | cover a gift with wrapping paper | prepare a gift | tear open a present
adult @ home | change a baby's diaper | put a fresh diaper on a baby | look after a baby | feed a baby with a spoon
adult @ home | rock a baby to sleep | hold a baby until it falls asleep | take care of an infant | wake a sleeping baby
adult @ home | pack {a bag} | put clothes into {a bag} | get ready for a trip | empty {a bag}
adult @ home | unlock the front door | open the front door with a key | enter a house | lock the front door
person @ home | brush {his} teeth | clean {his} teeth with a toothbrush | take care of dental hygiene | eat sweets in
  bed
person @ home | comb {his} hair | run a comb through {his} hair | groom | shave {his} head
person @ home | wash {his} hands | clean {his} hands with soap | clean up | cover {his} hands in mud
person @ home | put on {a garment} | get into {a garment} | get dressed | take off {a garment}
person @ home | tie {his} shoelaces | fasten {his} shoes | get ready to go out | walk barefoot
person @ home | look into a mirror | check {his} reflection | look at something | break a mirror
person @ home | cut paper with scissors | snip a sheet of paper | do crafts | glue pieces of paper together
person @ home | climb the stairs | walk up the steps | go upstairs | slide down the banister
person @ home | open {a opening} | push {a opening} open | handle {a opening} | shut {a opening}; nail {a opening} shut
person @ home | play {game} | pass the time with {game} | play a game; pass the time | work on a tax form
person @ home | hug {his} friend | embrace {his} friend | show affection | push {his} friend away
person @ home | draw {a picture} | make a drawing of something | make art | erase a drawing
person @ park | read {a reading} on a bench | sit on a bench with {a reading} | relax | sleep on a bench
person @ park | feed {some waterbird} | give bread to {some waterbird}; toss crumbs to {some waterbird} | feed birds |
  chase {some waterbird} away
person @ park | walk {a pet} on a leash | take {a pet} for a walk | go for a walk; exercise an animal | bathe {a pet}
person @ park | pet {a pet} | stroke {a pet} | touch an animal | run away from {a pet}
person @ park | hold {a pet} | carry {a pet} in both arms | take care of an animal | chase {a pet}
person @ park | sit under a tree | rest in the shade of a tree | relax | climb a tree; cut down a tree
person @ park | have a picnic | eat outside on a blanket | have a meal | clean up after a picnic
person @ park | fly a kite | hold the string of a kite | play | fold up a kite; look for a lost kite
person @ park | throw {a stick} for a dog | toss {a stick} to a dog | play with a dog | take {a stick} away from a dog
person @ park | lie on a blanket | stretch out on a blanket | rest; relax | stand on one leg
person @ park | do yoga | hold a yoga pose | exercise | smoke a cigarette on a bench
person @ park | jog along a path | run at an easy pace | exercise; get some fresh air | sit in a wheelchair; nap in a
  hammock
person @ park | swing on a swing | move back and forth on a swing | have fun | repair a swing
person @ park | blow soap bubbles | make bubbles | play with soap | pop a balloon
person @ park | pick {some flower} | gather {some flower} | collect plants | plant {some flower}; step on {some flower}
person @ park | take a photo of {a flower} | photograph {a flower} | use a camera | trample {a flower}
person @ zoo | watch {some wildanimal} | look at {some wildanimal} | observe animals | run away from {some wildanimal}
person @ zoo | take pictures of {a wildanimal} | photograph {a wildanimal} | use a camera near an animal | turn away
  from {a wildanimal}
person @ zoo | feed {a wildanimal} | give food to {a wildanimal} | take care of an animal | hunt {a wildanimal}
person @ street | ride {a cycle} | travel on {a cycle} | move on wheels; ride | repair {a cycle}; push {a cycle} uphill
person @ street | cross the road | walk across the street | walk | wait at the curb
person @ street | wait for a bus | stand at a bus stop | wait for transportation | drive a bus; run after a bus
person @ street | hold an umbrella | stand under an umbrella | stay dry | close an umbrella
person @ street | carry {a bag} | walk along with {a bag} | transport something | empty {a bag} on the ground
person @ street | push a stroller | walk behind a baby carriage | take a baby out | sit on a bench without a stroller
person @ street | walk up a flight of steps | climb some steps | go up | walk down a flight of steps
person @ street | look at a map | study a map | look for the way | draw graffiti on a wall
person @ street | get into {a car} | climb into {a car} | enter a vehicle | get out of {a car}
person @ street | wash {a car} | clean {a car} with soap and water | do some cleaning | paint {a car}; drive {a car}
person @ street | lean against a wall | rest {his} back on a wall | stand still | climb over a wall
person @ street | wave {some sign} | hold up {some sign} | show something to others | burn {some sign}
person @ street | hand out leaflets | give leaflets to passers-by | distribute information | pick up litter
person @ street | skate along the sidewalk | glide by on inline skates | travel on wheels | sit on the curb with bare
  feet
adult @ street | smoke a cigarette | have a smoke | use tobacco | put out a cigarette
person @ street | ride {a board} | do tricks on {a board} | balance on a board | carry {a board} under one arm
person @ street | laugh out loud | burst into laughter | have a good time | cry bitterly; shout in anger
person @ street | paint {a picture} on a wall | cover a wall with {a picture} | make art; use paint | scrub paint off a
  wall
person @ street | ask for directions | ask the way | speak to somebody | ignore everyone around
person+ @ street | shake hands | greet each other with a handshake | greet each other | turn their backs on each other
person+ @ street | march in a parade | walk in a procession | take part in a public event | watch a parade from a window
adult+ @ street | protest against a new law | demonstrate in the street | express their opinion | celebrate a new law
adult+ @ street | argue about a parking space | quarrel over a place to park | have a disagreement | hug each other
person+ @ street | wait in a long line | stand in a queue | wait | rush through an open door
person+ @ home | play cards around a table | sit together over a card game | play a game | fight over a broken table
adult+ @ restaurant | toast with champagne | raise their glasses | celebrate; drink together | eat breakfast in silence
person+ @ restaurant | have dinner together | share a meal | eat | wash the dishes together
person+ @ park | dance in a circle | dance hand in hand | move to music | sit motionless on the ground
person+ @ park | play tug of war | pull on both ends of a rope | take part in a contest | cut a rope in half
person+ @ park | sit around a campfire | gather around a fire | keep warm | put out a fire with water
person+ @ office | have a meeting | discuss a project together | work; talk | work alone at separate desks
person+ @ stage | sing in a choir | perform as a choir | make music | listen to a choir
person+ @ beach | play volleyball | hit a ball over a net | play a ball game | lie asleep on towels
child @ park | climb {a tree} | make {his} way up {a tree} | play outside; climb | jump down from {a tree}
child @ park | play with {a toy} | amuse {his}self with {a toy} | play | break {a toy}
child @ park | jump over a puddle | leap across a puddle | jump | fall into a puddle
child @ park | go down a slide | slide down | play | walk away from a slide
child @ park | chase {a insect} | run after {a insect} | play outdoors; run | run away from {a insect}
child @ park | kick {a ball} | hit {a ball} with {his} foot | play with {a ball} | sit on {a ball}
child @ park | skip rope | jump over a swinging rope | get some exercise | tie a rope to a tree
child @ garden | dig a hole | make a hole in the ground | play in the dirt | fill in a hole
child @ garden | splash in a wading pool | play in shallow water | get wet | sit in a sandbox with dry clothes
child @ garden | run through a sprinkler | get sprayed by a lawn sprinkler | cool off | hide from the water in a shed
child @ garden | look for Easter eggs | search the grass for colored eggs | search for something | throw eggs at a fence
child @ home | build {a structure} out of blocks | stack blocks to make {a structure} | play with toys | knock over {a
  structure}
child @ home | blow out birthday candles | put out the candles on a cake | celebrate a birthday | light birthday candles
child @ home | hide under {a furniture} | crouch below {a furniture} | hide | stand on top of {a furniture}
child @ home | color a picture with crayons | fill in a picture with colors | make art | tear a picture in two
child @ home | jump on the bed | bounce up and down on the bed | play indoors; have fun | sleep in the bed
child @ home | eat {a fruit} | bite into {a fruit} | have a healthy snack | refuse to eat {a fruit}
child @ school | raise {his} hand | put {his} hand up | ask for attention | sleep at a desk
child @ school | write on a chalkboard | use chalk on a board | write | wipe a chalkboard clean
child @ school | do homework | work on school exercises | study | play tag
child @ school | paint {a picture} with watercolors | use watercolors to make {a picture} | do an art project | crumple
  up {a picture}
child @ beach | build a sandcastle | make a castle out of sand | play in the sand | destroy a sandcastle
child @ beach | collect shells | gather seashells | look for things on the shore | throw shells into the sea
child @ beach | run into the waves | dash into the sea | get wet | run away from the waves
child @ snow | build a snowman | make a figure out of snow | play in the cold | melt a snowman with a torch
child @ snow | ride a sled down a hill | slide downhill on a sled | have fun in winter | pull a sled up a hill
child @ snow | throw a snowball | fling a ball of snow | play in the snow | lie in a warm bed
teacher @ school | explain a problem on the board | show students how to solve a problem | teach | fall asleep in a
  chair
teacher @ school | read a story to children | read aloud to a class | entertain young people; speak | listen to
  children read aloud
teacher @ school | hand out test papers | distribute an exam | start a test; give papers to people | collect test papers
teacher @ school | give a lecture | speak to an audience | talk | listen to a lecture
teacher @ school | grade essays | mark students' papers | work | write an essay
office @ office | write on a whiteboard | make notes on a whiteboard | present ideas; write | erase a whiteboard
office @ office | work on {a device} | use {a device} for work | work | throw {a device} out of a window
office @ office | sign a contract | put {his} name on a contract | handle a document | shred a contract
office @ office | stack papers on a desk | pile up documents | organize paperwork | scatter papers on the floor
office @ office | drink coffee at a desk | have a coffee while working | take in caffeine | spill coffee over a desk
office @ office | give a presentation | present slides to colleagues | speak in front of others | sleep through a
  presentation
office @ office | answer the telephone | pick up a ringing phone | respond to a caller | ignore a ringing telephone
office @ street | hail a taxi | signal for a taxi to stop | look for a ride | drive a taxi
office @ street | hurry to work with {a bag} | rush along, carrying {a bag} | go somewhere quickly | stroll along
  without a care
medic @ hospital | examine a patient | check a patient's health | provide medical care | ignore a patient
medic @ hospital | bandage a wounded arm | wrap a bandage around an injured arm | treat an injury | remove a bandage
  from an arm
medic @ hospital | give a child an injection | vaccinate a child | use a needle; treat somebody | give a child a
  lollipop
medic @ hospital | look at an X-ray | study an X-ray image | look at a medical picture | sleep in a chair
medic @ hospital | push a patient in a wheelchair | move a patient around in a wheelchair | help someone | sit in a
  wheelchair
medic @ hospital | weigh {a pet} | put {a pet} on a scale | check an animal | let {a pet} run away
uniform @ street | direct traffic | tell drivers where to go | control vehicles; work | drive a truck through traffic
uniform @ street | stop {a car} | make {a car} halt | control traffic | drive away in {a car}
uniform @ street | guard an entrance | keep watch at an entrance | protect a place | leave an entrance unattended
uniform @ street | spray water on a burning house | fight a house fire with a hose | try to put out a fire | set a
  house on fire
uniform @ field | march in formation | walk in step | move together; walk | sleep in tents
uniform @ field | aim {a weapon} at a target | point {a weapon} at a target | practice shooting | clean {a weapon}
uniform @ street | rescue {a pet} from a tree | bring {a pet} down from a tree | help an animal | chase {a pet} up a
  tree
worker @ site | carry {a load} | transport {a load} | move something heavy; work | drop {a load}; sit on {a load}
worker @ site | lay bricks | build a wall with bricks | do masonry work | tear down a brick wall
worker @ site | climb {a mountable} | go up {a mountable} | climb | fall off {a mountable}
worker @ site | pour concrete | fill a form with wet cement | build something | break up concrete with a drill
worker @ site | dig a trench with {a gardentool} | make a long ditch | move earth | fill in a trench
worker @ site | repair a roof | fix the top of a house | do maintenance work | take a roof apart
worker @ site | operate a crane | control a crane | use heavy machinery | eat lunch beside a crane
crafts @ workshop | weld a metal frame | join metal parts with heat | work with metal | paint a metal frame
crafts @ workshop | saw {a load} in half | cut {a load} in two | use a tool | nail {a load} shut
crafts @ workshop | use {a tool} | work with {a tool} | do manual work | put {a tool} away
crafts @ workshop | sharpen {a tool} | grind {a tool} on a stone | take care of equipment | break {a tool}
crafts @ workshop | repair {a vehiclepart} | fix {a vehiclepart} | work on a vehicle | steal {a vehiclepart}
crafts @ workshop | change a tire | replace a tire | work on a vehicle | let the air out of a tire
crafts @ workshop | fix {a electronics} | mend {a electronics} | repair an appliance | smash {a electronics}
crafts @ workshop | paint {a furniture} | put a coat of paint on {a furniture} | do some painting | scrape the paint
  off {a furniture}
crafts @ workshop | assemble {a furniture} | put {a furniture} together | build furniture | take {a furniture} apart
crafts @ workshop | measure {a load} | take the dimensions of {a load} | use a measuring tape | burn {a load}
worker @ road | fill a pothole | mend a hole in the road | fix a road | stand around idle
worker @ street | clean {a surface} | wipe down {a surface} | do cleaning work | get {a surface} dirty
worker @ street | trim {a tree} with a saw | cut branches off {a tree} | care for trees | plant {a tree}
farmer @ field | harvest {crop} | gather in {crop} | do farm work; work outdoors | sow {crop}; set fire to {crop}
farmer @ field | drive a tractor | steer a tractor | operate a machine | repair a tractor; walk behind an ox
farmer @ field | milk {a livestock} by hand | get milk from {a livestock} | tend livestock | sell {a livestock} at a
  market
farmer @ field | herd {some livestock} | drive {some livestock} along | work with animals | chase away a wolf
farmer @ field | feed {some livestock} | give hay to {some livestock} | take care of animals | shear a sheep
farmer @ field | plow the soil | turn over the earth | prepare the ground | walk across frozen snow
farmer @ field | mend {a barrier} | repair {a barrier} | do repair work | tear down {a barrier}
farmer @ garden | plant {some flower} | put {some flower} into the ground | do gardening | pull {some flower} out of
  the ground
farmer @ garden | rake leaves | gather fallen leaves | do yard work; tidy up outside | blow leaves all over the lawn
farmer @ garden | mow the lawn | cut the grass | do yard work | lie on the lawn
farmer @ garden | pull weeds | remove weeds from the soil | do gardening | plant tiny seeds
farmer @ garden | prune {a plant} | cut back {a plant} | care for a plant | water {a plant}
farmer @ garden | dig with {a gardentool} | turn soil with {a gardentool} | use a garden tool | lean on {a gardentool}
farmer @ garden | push a wheelbarrow | move a wheelbarrow along | transport something | tip over a wheelbarrow
farmer @ field | pick {some fruit} from a tree | gather {some fruit} in an orchard | collect fruit | peel {some fruit}
  at a table
musician @ stage | play {a instr_str} | perform on {a instr_str} | make music; play an instrument | tune {a instr_str};
  put {a instr_str} in its case
musician @ stage | play {a instr_wind} | blow into {a instr_wind} | make music; play an instrument | clean {a
  instr_wind}
musician @ home | play {a instr_key} | press the keys of {a instr_key} | make music; practice an instrument | sit
  silently next to {a instr_key}
musician @ stage | beat {a drum} | bang on {a drum} | make a rhythm; make music | carry {a drum} away
musician @ stage | sing {a song} | perform {a song} | use {his} voice; entertain people | hum quietly without words
musician @ street | play {a instr_str} for money | earn money by playing {a instr_str} | perform in public | sell {a
  instr_str}
musician @ stage | sing into a microphone | perform with a microphone | sing | put away a microphone
musician @ home | tune {a instr_str} | adjust the strings of {a instr_str} | handle an instrument | break the strings
  of {a instr_str}
musician @ stage | conduct an orchestra | lead an orchestra with a baton | direct music | listen to an orchestra
entertainer @ stage | juggle {some fruit} | keep {some fruit} in the air | show off a skill | eat {some fruit}
entertainer @ stage | perform {a dance} | dance {a dance} | move to music; dance | sit on a chair backstage
entertainer @ stage | walk on a tightrope | balance on a rope | perform a stunt | fall off a tightrope
entertainer @ stage | pull a rabbit out of a hat | make a rabbit appear from a hat | do a magic trick | put on a hat
entertainer @ stage | bow to the audience | thank the crowd with a bow | end a performance | turn {his} back to the
  audience
entertainer @ street | breathe fire | blow flames from {his} mouth | do something dangerous | drink a glass of water
entertainer @ street | ride a unicycle | balance on one wheel | ride | fall off a unicycle
entertainer @ street | make balloon animals | twist balloons into shapes | entertain children | pop some balloons
entertainer @ stage | put on makeup | paint {his} face | get ready for a show | wash off makeup
entertainer @ stage | leap into the air | jump high | perform; jump | lie flat on the floor
athlete @ gym | lift weights | pump iron; raise a barbell | work out; train | rest on a bench
athlete @ gym | do push-ups | push up from the floor with both arms | exercise | stand with folded arms
athlete @ gym | run on a treadmill | use a treadmill | exercise | sit on a treadmill
athlete @ gym | jump over {a barrier} | leap across {a barrier} | jump | crawl under {a barrier}
athlete @ gym | do a handstand | stand upside down on both hands | show gymnastic skills | stand on both feet
athlete @ gym | stretch both legs | do stretching exercises | warm up | sleep on a mat
athlete @ gym | climb {a mountable} | pull up on {a mountable}; scale {a mountable} | exercise; climb | slide down {a
  mountable}
athlete @ gym | hit a punching bag | punch a heavy bag; box with a bag | practice boxing | hug a punching bag
athlete @ gym | do a backflip | flip over backward | perform an acrobatic move | stand perfectly still
athlete @ track | run in a race | race against others | compete; run | walk off the track
athlete @ track | cross the finish line | reach the end of a race | finish a race | start a race
athlete @ track | jump hurdles | clear hurdles | take part in athletics | trip over a hurdle
athlete @ pitch | play {teamsport} | compete in {teamsport} | play a sport | watch {teamsport} from the
  stands
athlete @ court | play {racket} | compete in {racket} | play a sport | rest beside the net
athlete @ court | dribble a basketball | bounce a basketball | play basketball; handle a ball | deflate a basketball
athlete @ court | dunk a basketball | slam a basketball through the hoop | score a basket | miss the hoop completely
athlete @ pitch | kick a ball toward the goal | shoot at the goal | play with a ball | pick up the ball with both hands
athlete @ pitch | throw a javelin | hurl a javelin | compete in athletics | drop a javelin
athlete @ pitch | swing {a sporttool} | use {a sporttool} | play a sport | break {a sporttool} in two
athlete @ pitch | catch {a ball} | get hold of {a ball} in the air | play a ball game | drop {a ball}; kick {a ball}
  away
athlete @ pitch | throw {a ball} | toss {a ball} | play with {a ball} | catch {a ball}
athlete @ pitch | celebrate a goal | cheer after scoring | express joy | argue with the referee
athlete @ pitch | tackle an opponent | bring down an opponent | take part in a game | congratulate an opponent
athlete @ pool | swim | move through the water with strong strokes | exercise | sunbathe next to the water
athlete @ pool | dive from a high board | jump headfirst off a diving platform | enter the water; jump | climb down
  from a diving board
athlete @ pool | float on an air mattress | drift on an inflatable mattress | relax | dive to the bottom
athlete @ pool | swim underwater | glide below the surface | swim | stand on the edge of the pool
athlete @ snow | ski down {a hill} | race down {a hill} on skis | do a winter sport | walk up {a hill}; ride a lift up
  {a hill}
athlete @ snow | snowboard over a ramp | jump off a ramp on a snowboard | do a winter sport | carry a snowboard on one
  shoulder
athlete @ snow | skate on the ice | glide over the ice | move on frozen water | fall through the ice
athlete @ snow | pull {a load} on a sled | drag {a load} along on a sled | move something through the cold | ride on a
  sled
athlete @ beach | surf a big wave | ride a wave on a surfboard | take part in a water sport | carry a surfboard up the
  beach
athlete @ beach | run along the shore | jog next to the waves | exercise; run | sit under a parasol
athlete @ water | paddle a kayak | propel a kayak through the water | travel by water | sink a kayak
athlete @ water | row {a boat} | move {a boat} with oars | do a water sport | tie up {a boat}
athlete @ water | water-ski behind {a boat} | get pulled over the water by {a boat} | do a water sport | steer {a boat}
athlete @ forest | ride a mountain bike downhill | cycle down a rough trail | ride a bike | push a bike uphill
athlete @ forest | climb {a hill} | go up {a hill} | do something athletic; climb | descend {a hill}
athlete @ road | cycle in a race | ride a racing bike | compete; ride a bike | repair a flat tire
athlete @ court | serve a tennis ball | hit a tennis ball into play | play tennis | pick up tennis balls
athlete @ gym | wrestle with an opponent | fight an opponent on the floor | compete | bow to an opponent
athlete @ gym | fence with a sword | fight with a blade | practice a combat sport | put down a sword
athlete @ gym | swing from the bars | hang and swing on bars | do gymnastics | fall off the bars
adult @ forest | hike along a trail | walk through the woods | take a walk in nature; walk | ride in a cable car
adult @ forest | chop wood with an axe | split logs | do physical work | plant {a tree}
adult @ forest | pitch a tent | set up a tent | prepare to camp | take down a tent
adult @ forest | build a fire | make a campfire | get a fire started | put out a fire
adult @ forest | look through binoculars | use binoculars | observe something far away | close both eyes
adult @ forest | pick mushrooms | gather mushrooms | look for food in nature | cook mushrooms
adult @ field | ride {a mount} | sit on {a mount} | travel on an animal | lead {a mount} by a rope; fall off {a mount}
adult @ field | brush {a mount} | groom {a mount} | take care of {a mount} | ride {a mount}
adult @ field | shoot an arrow at a target | practice archery | use a bow | pull an arrow out of a target
adult @ field | fly a model airplane | control a toy plane | enjoy a hobby | break a model airplane
adult @ water | fish with a rod | try to catch fish; hold a fishing rod | do some fishing | swim with the fish
adult @ water | steer {a boat} | pilot {a boat} | travel by water | repair {a boat} on land
adult @ water | catch {a fish} | pull {a fish} out of the water | go fishing | release {a fish}; eat {a fish}
adult @ water | stand up on a paddleboard | balance on a board in the water | do a water sport | fall into the water
adult @ water | wave from {a boat} | greet people from {a boat} | spend time on the water | swim away from {a boat}
adult @ beach | lie in the sun | sunbathe; get a tan | relax outdoors | hide from the rain
adult @ beach | walk barefoot on the sand | stroll on the sand without shoes | walk | wear heavy boots
adult @ beach | put on sunscreen | rub sunscreen on {his} arms | protect {his} skin | sit fully dressed in the shade
adult @ snow | shovel snow off the driveway | clear snow from a driveway | work outside in winter | swim in a heated
  pool
adult @ snow | drive a snowmobile | ride a snowmobile | ride over the snow | walk on snowshoes
adult @ snow | scrape ice off {a car} | remove ice from {a car} | get ready to drive | sit inside {a car}
adult @ street | load {a load} into {a car} | put {a load} in {a car} | move something | unload {a load} from {a car}
adult @ street | sell {some reading} | offer {some reading} to buyers | work as a vendor | burn {some reading}
adult @ street | park {a car} | bring {a car} to rest in a parking space | operate a vehicle | push {a car} down the
  road
adult @ street | kiss a baby | give a baby a kiss | show love | scold a baby
adult @ street | take a selfie | photograph {his} own face | use a phone or camera | cover {his} face
adult @ street | feed {some bird} | scatter crumbs for {some bird} | give food to animals | scare away {some bird}
adult @ home | play with {a pet} | have fun with {a pet} | spend time with an animal | lock {a pet} in a cage
adult @ home | bathe {a pet} | wash {a pet} in a tub | clean an animal | feed {a pet}
adult @ home | get a haircut | have {his} hair cut | receive a service | cut somebody else's hair
adult @ home | carve {a craft} | make {a craft} by hand | make something | smash {a craft}
adult @ workshop | shape {a vessel} out of clay | form {a vessel} from clay | do pottery | drop {a vessel} on the floor
adult @ workshop | carve {a statue} | chisel {a statue} | create art | destroy {a statue}
adult @ workshop | paint {a picture} on canvas | create {a picture} with a brush | make a work of art | sell {a picture}
adult @ workshop | weave a rug on a loom | make a rug with a loom | do a traditional craft | roll up a rug
adult @ market | weigh {some veg} on a scale | put {some veg} on a scale | handle goods; work at a stall | eat {some
  veg}
adult @ market | bargain with a vendor | haggle over a price | talk about money | pay the full price without a word
adult @ restaurant | serve drinks to guests | bring guests their drinks | wait on people | clear away empty glasses
adult @ restaurant | order from a menu | tell the waiter what to bring | get ready to eat | pay the bill
adult @ restaurant | wipe {a surface} with a cloth | clean {a surface} | do cleaning work | cover {a surface} with dirt
adult @ hospital | lie in a hospital bed | rest in a bed at a clinic | receive care | dance down a corridor
"""

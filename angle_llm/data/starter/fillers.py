"""Fillers of the template slots: `slot : value > companion, value > companion, …` (see `grammar` for the notation).

Companies, teams and institutes are invented; cities and countries are real.
"""

FILLERS = """
n : two, three, four, five, six, seven, eight, nine, ten, eleven, twelve
big : 14, 17, 23, 26, 31, 38, 45, 52, 60, 74, 85, 96, 110, 130, 150, 180, 220, 340
huge : 1,200, 1,800, 2,500, 3,000, 4,600, 5,500, 7,000, 9,000, 12,000, 15,000, 20,000, 35,000
pct : 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 16, 18, 21, 25
mag : 5.1, 5.4, 5.8, 6.0, 6.3, 6.6, 6.9, 7.1
years : two years, three years, five years, seven years, nine years, twelve years, fifteen years
sum : 20 million, 45 million, 80 million, 150 million, 300 million, 600 million, 1.2 billion, 2.4 billion, 3 billion
day : Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
month : January, February, March, April, May, June, July, August, September, October, November, December
n_th : second, third, fourth, fifth, sixth, seventh, eighth
big_temp : 34, 36, 37, 38, 39, 41, 42, 44
color : red, blue, white, black, green, yellow, orange, pink, purple, brown
city : Lyon > France, Marseille > France, Hamburg > Germany, Munich > Germany, Milan > Italy, Naples > Italy, Seville >
  Spain,
  Bilbao > Spain, Porto > Portugal, Krakow > Poland, Gdansk > Poland, Osaka > Japan, Sapporo > Japan, Busan > South
  Korea,
  Mumbai > India, Chennai > India, Kolkata > India, Lahore > Pakistan, Karachi > Pakistan, Dhaka > Bangladesh, Lagos >
  Nigeria,
  Nairobi > Kenya, Mombasa > Kenya, Accra > Ghana, Cairo > Egypt, Alexandria > Egypt, Casablanca > Morocco, Tunis >
  Tunisia,
  Durban > South Africa, Cape Town > South Africa, Lima > Peru, Bogota > Colombia, Quito > Ecuador, Santiago > Chile,
  Rosario > Argentina, Recife > Brazil, Toronto > Canada, Calgary > Canada, Denver > the United States, Houston > the
  United States,
  Boston > the United States, Seattle > the United States, Leeds > England, Bristol > England, Glasgow > Scotland, Cork
  > Ireland,
  Bergen > Norway, Malmo > Sweden, Tampere > Finland, Aarhus > Denmark, Antwerp > Belgium, Rotterdam > the Netherlands,
  Graz > Austria,
  Zurich > Switzerland, Thessaloniki > Greece, Izmir > Turkey, Ankara > Turkey, Perth > Australia, Brisbane > Australia,
  Auckland > New Zealand, Manila > the Philippines, Jakarta > Indonesia, Hanoi > Vietnam, Guadalajara > Mexico, Amman >
  Jordan
country : France > French, Germany > German, Italy > Italian, Spain > Spanish, Portugal > Portuguese, Poland > Polish,
  Japan > Japanese, South Korea > South Korean, India > Indian, Pakistan > Pakistani, Bangladesh > Bangladeshi, Nigeria
  > Nigerian,
  Kenya > Kenyan, Ghana > Ghanaian, Egypt > Egyptian, Morocco > Moroccan, South Africa > South African, Peru > Peruvian,
  Colombia > Colombian, Chile > Chilean, Argentina > Argentine, Brazil > Brazilian, Canada > Canadian, Ireland > Irish,
  Norway > Norwegian, Sweden > Swedish, Finland > Finnish, Denmark > Danish, Belgium > Belgian, Austria > Austrian,
  Greece > Greek,
  Turkey > Turkish, Australia > Australian, Indonesia > Indonesian, Vietnam > Vietnamese, Mexico > Mexican, Thailand >
  Thai,
  Hungary > Hungarian, Romania > Romanian, Bulgaria > Bulgarian, Iceland > Icelandic, Jordan > Jordanian, Nepal >
  Nepalese
country_far : Namibia, Mongolia, Oman, Chad, Bolivia, Kazakhstan
company : Halvorsen Steel > steelmaker, Brightwater Foods > food company, Norvik Airlines > airline, Castellan Bank >
  bank,
  Orbiline Telecom > phone company, Tamarind Motors > carmaker, Pellar Chemicals > chemical maker, Quillon Software >
  software firm,
  Marlow and Finch > clothing retailer, Sunfield Energy > energy company, Deltacore Chips > chip maker, Veridian Pharma
  > drugmaker,
  Kestrel Aerospace > plane maker, Harborline Shipping > shipping company, Oakhurst Homes > builder, Lumora Media >
  media group,
  Bluepine Paper > paper producer, Zephyr Rail > railway operator, Cobalt Ridge Mining > mining company, Greenlane
  Supermarkets > supermarket chain,
  Arcwell Insurance > insurer, Pomelo Games > game developer, Stellan Furniture > furniture maker, Ridgeway Breweries >
  brewer
team : the Harbor City Hawks, the Lakeside Rovers, the Northgate Lions, the Eastport Sharks, the Valley Kings, the
  Redstone Bears,
  the Union Falcons, the Westfield Tigers, the Silver Bay Pirates, the Granite Wolves, the Oldtown Rangers, the Coastal
  Comets
sport : football, basketball, hockey, rugby, handball, volleyball, cricket, baseball
goods : toys > consumer products, baby strollers > products for children, frozen pizzas > food products, smoke alarms >
  household devices,
  electric kettles > kitchen appliances, bicycle helmets > safety gear, washing machines > household appliances, car
  seats > car equipment,
  peanut bars > snacks, space heaters > heating devices, blood pressure tablets > medicines, laptop batteries >
  electronic parts
commodity : oil > crude, gold > the precious metal, wheat > the grain, copper > the metal, coffee > coffee beans,
  natural gas > the fuel,
  sugar > the sweetener, cotton > the fiber, silver > the precious metal, cocoa > cocoa beans, corn > the grain,
  aluminum > the metal
crop : rice > grain, wheat > grain, coffee > cash crop, grape > fruit, olive > fruit, potato > vegetable, apple >
  fruit, maize > grain
disease : measles > infectious disease, cholera > infectious disease, dengue fever > mosquito-borne illness, malaria >
  tropical disease,
  bird flu > animal disease, diabetes > chronic illness, tuberculosis > lung disease, hepatitis > liver disease, asthma
  > lung condition
planet : Mars, Venus, Jupiter, Saturn, Mercury, Neptune
species : sea turtles > marine animals, gray wolves > predators, mountain gorillas > apes, blue whales > marine mammals,
  honeybees > insects, snow leopards > big cats, African elephants > large mammals, emperor penguins > birds, tree
  frogs > amphibians,
  polar bears > Arctic animals, coral fish > sea creatures, fruit bats > flying mammals, lynxes > wild cats, sharks >
  large fish
building : a hotel, a school, a shopping mall, a warehouse, an apartment block, a theater, a hospital, a textile
  factory, a museum, a bakery
vehicle : bus > vehicle, passenger train > train, minibus > vehicle, truck > vehicle, tanker > vehicle, tram > rail
  vehicle, ferry > vessel
official : the finance minister, the foreign minister, the health minister, the prime minister, the interior minister,
  the president,
  the central bank governor, the defense minister, the trade minister, the education minister, the environment minister
group : teachers > public employees, nurses > health workers, dock workers > port staff, pilots > airline staff,
  farmers > growers,
  bus drivers > transport staff, miners > workers, garbage collectors > city workers, students > young people, taxi
  drivers > drivers,
  steelworkers > factory workers, prison guards > state employees, truckers > drivers, railway workers > transport staff
tax : fuel > gasoline, tobacco > cigarettes, alcohol > alcoholic drinks, sugar > sweetened products, property > real
  estate
cause : faulty wiring, a gas leak, a cigarette, a lightning strike, an overheated battery, a kitchen accident, fireworks
flower_one : rose, tulip, lily, orchid, carnation, hibiscus, geranium, poppy, camellia
food_one : tomatoes, mushrooms, spinach, shrimp, beans, peas, grated cheese, chicken strips, olives, sliced carrots,
  fried egg, tofu
animal_plural : cows, sheep, goats, horses, deer, donkeys, llamas, camels, zebras, dogs
fruit_plural : apples, lemons, oranges, pears, peaches, plums, cherries, grapes, figs
"""
